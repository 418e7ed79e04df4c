"""A linear classifier on frozen features, which measures how well they separate the classes."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

STEPS = 60
PENALTY = 3e-3


def standardised(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (x - mean) / std


@dataclass(frozen=True)
class Accuracy:
    overall: float
    mean_per_class: float


def accuracy_of(predicted: torch.Tensor, true: torch.Tensor) -> Accuracy:
    right = (predicted == true).float()
    per_class = [float(right[true == label].mean()) for label in true.unique()]
    return Accuracy(round(float(right.mean()), 4), round(sum(per_class) / len(per_class), 4))


def linear_probe(
    train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, penalty: float = PENALTY
) -> Accuracy:
    """Return the accuracy of logistic regression on `test` (L-BFGS, `penalty` on the squared weights)."""
    mean, std = train_x.float().mean(0), train_x.float().std(0) + 1e-3
    train_x, test_x = standardised(train_x.float(), mean, std), standardised(test_x.float(), mean, std)
    train_y, test_y = train_y.to(train_x.device), test_y.to(train_x.device)
    classes = int(train_y.max()) + 1
    weight = torch.zeros(classes, train_x.shape[1], device=train_x.device, requires_grad=True)
    bias = torch.zeros(classes, device=train_x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(train_x, weight, bias), train_y) + penalty * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return accuracy_of(F.linear(test_x, weight, bias).argmax(1), test_y)
