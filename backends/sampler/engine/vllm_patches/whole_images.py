"""Images whose tokens see each other (Gemma 3) are computed in one step, since their tokens need all keys of the image.

vLLM does so, but not if the step before ended just before the image, or if a cached prefix ends within it: it then cuts
the image where the step's room ends, and the tokens do not see those of the next step. Here the image waits for a step
that has the room.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tinker_server.backends.sampler.engine.vllm_patches import targets


def _in_one_step(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def scheduled(  # noqa: PLR0913 - vLLM's own arguments
        self: Scheduler,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> Any:
        if self.scheduler_config.disable_chunked_mm_input:
            num_new_tokens = whole_tokens(request.mm_features, num_computed_tokens, num_new_tokens)
        return schedule(
            self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
        )

    return scheduled


def whole_tokens(features: Sequence[MultiModalFeatureSpec], num_computed: int, num_new: int) -> int:
    """Return the most of the next tokens that do not end within an image."""
    end = num_computed + num_new
    for position in (feature.mm_position for feature in features):
        if position.offset < end < position.offset + position.length:
            room: int = position.offset - num_computed
            return max(0, room)
    return num_new


def keep_images_whole() -> None:
    """Schedule no part of an image alone."""
    targets.SCHEDULED_IMAGES.replace(_in_one_step(Scheduler._try_schedule_encoder_inputs))
