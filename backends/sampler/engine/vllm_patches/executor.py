"""vLLM's executor of an engine with several ranks, named in the engine argument `distributed_executor_backend`.

The ranks are processes of their own, beside that of the scheduler, which needs our changes too. It makes this class
before its scheduler, and nothing else of ours.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tinker_server.backends.patches import require_as_written
from tinker_server.backends.sampler.engine.vllm_patches import targets


class Executor(MultiprocExecutor):  # type: ignore[misc]
    """Starts the ranks, and collects all their answers, also where one of them fails."""

    def _init_executor(self) -> None:
        import tinker_server.backends.sampler.engine.vllm_patches.worker  # noqa: F401 - changes the scheduler's process

        require_as_written([targets.ANSWERS_OF_RANKS])
        super()._init_executor()

    def collective_rpc(  # noqa: PLR0913 - vLLM's own arguments
        self,
        method: object,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **others: object,
    ) -> object:
        """Call a method of every rank. Raises RuntimeError with the error of the first rank that fails.

        vLLM raises at the first failure that it reads, and takes the answers of the ranks behind it for those to the
        next call.
        """
        is_of_all = unique_reply_rank is None and not non_block
        if not is_of_all or not isinstance(method, str) or method in vars(WorkerWrapperBase):
            return super().collective_rpc(method, timeout, args, kwargs, non_block, unique_reply_rank, **others)
        answers = super().collective_rpc("attempt", timeout, (method, args, kwargs or {}), **others)
        for error, _ in answers:
            if error is not None:
                raise RuntimeError(error)
        return [answer for _, answer in answers]
