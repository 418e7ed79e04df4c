"""A linear classifier on frozen features, which measures how well they separate the classes."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

STEPS = 60
PENALTY = 3e-3


@dataclass(frozen=True)
class Accuracy:
    overall: float
    mean_per_class: float


def accuracy_of(predicted: torch.Tensor, true: torch.Tensor) -> Accuracy:
    right = (predicted == true).float()
    per_class = [float(right[true == label].mean()) for label in true.unique()]
    return Accuracy(round(float(right.mean()), 4), round(sum(per_class) / len(per_class), 4))


def fit_classifier(
    x_NC: torch.Tensor, labels_N: torch.Tensor, classes: int, penalty: float = PENALTY
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of logistic regression (L-BFGS, `penalty` on the squared weights of standardised `x`)."""
    x_NC, labels_N = x_NC.float(), labels_N.to(x_NC.device)
    mean_C, std_C = x_NC.mean(0), x_NC.std(0) + 1e-3
    standard_NC = (x_NC - mean_C) / std_C
    weight = torch.zeros(classes, x_NC.shape[1], device=x_NC.device, requires_grad=True)
    bias = torch.zeros(classes, device=x_NC.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(standard_NC, weight, bias), labels_N) + penalty * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    scaled = weight.detach() / std_C
    return scaled, bias.detach() - scaled @ mean_C


def linear_probe(train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor) -> Accuracy:
    """Return the accuracy on `test` of a classifier fitted to `train`."""
    weight, bias = fit_classifier(train_x, train_y, int(train_y.max()) + 1)
    return accuracy_of(F.linear(test_x.float(), weight, bias).argmax(1), test_y.to(test_x.device))
