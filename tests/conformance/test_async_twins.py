"""The deprecated `*_async` twin of every method sends what the method sends; numbers are the checklist's.

pytest tests/conformance/test_async_twins.py
"""

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from google.protobuf.json_format import MessageToDict
from tinker import types

from tests.conformance.wire import Seen, Wire
from tests.fake_server import Running, datum
from tinker_server.api_schemas import tinker_wire_pb2 as pb

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
DAY = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
CONFIG = "/client/config"
"""Requests of each kind of client before its very first own one."""
Arguments = dict[str, Callable[[], tuple[Any, ...]]]
"""Per method: what to call it with. Called before the record begins, so that it may save what the method needs."""
_names = itertools.count()


def name() -> str:
    return f"n{next(_names)}"


def loss(_: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    return -sum(one.sum() for one in logprobs), {}


def of_training(model: tinker.TrainingClient) -> Arguments:
    saved, sampled = model.save_state(name()).result().path, model.save_weights_for_sampler(name()).result().path
    work = ([datum()], "cross_entropy")
    return {
        "create_sampling_client": lambda: (sampled,),
        "forward": lambda: work,
        "forward_backward": lambda: work,
        "forward_backward_custom": lambda: ([datum()], loss),
        "get_info": tuple,
        "load_state": lambda: (saved,),
        "load_state_with_optimizer": lambda: (saved,),
        "optim_step": lambda: (types.AdamParams(learning_rate=0.5),),
        "save_state": lambda: (name(), 7200, False, {"a": "b"}),
        "save_weights_and_get_sampling_client": tuple,
        "save_weights_external": lambda: (name(), 7200),
        "save_weights_for_sampler": lambda: (name(), 7200, {"a": "b"}),
    }


def of_service(model: tinker.TrainingClient) -> Arguments:
    saved = model.save_state(name()).result().path
    return {
        "create_lora_training_client": lambda: ("tiny", 8, 3, True, False, True, {"a": "b"}),
        "create_sampling_client": lambda: (saved,),
        "create_training_client_from_state": lambda: (saved, "tiny", {"a": "b"}),
        "create_training_client_from_state_with_optimizer": lambda: (saved,),
        "get_server_capabilities": tuple,
    }


def of_sampling() -> Arguments:
    return {
        "compute_logprobs": lambda: (PROMPT,),
        "get_base_model": tuple,
        "sample": lambda: (PROMPT, 2, ONE_TOKEN),
    }


def of_admin() -> Arguments:
    return {
        "get_audit_log": tuple,
        "get_billing_usage": lambda: DAY,
        "get_current_checkpoint_storage_usage": lambda: ("p",),
    }


def of_rest(model: tinker.TrainingClient, sampler_id: str) -> Arguments:
    def path() -> str:
        return model.save_state(name()).result().path

    saved, external = path(), model.save_weights_external(name()).result().path
    session_id = model.model_id.partition(":train:")[0]
    return of_admin() | {
        "assign_session_project": lambda: (session_id, "p"),
        "copy_weights": lambda: (saved, "p"),
        "delete_checkpoint": lambda: (model.model_id, path().partition(f"{model.model_id}/")[2]),
        "delete_checkpoint_from_tinker_path": lambda: (path(),),
        "export_session_trace": lambda: (session_id,),
        "get_external_weights_urls": lambda: (external,),
        "get_sampler": lambda: (sampler_id,),
        "get_session": lambda: (session_id,),
        "get_training_run": lambda: (model.model_id,),
        "get_training_run_by_tinker_path": lambda: (saved,),
        "list_checkpoints": lambda: (model.model_id,),
        "list_sessions": lambda: (3, 1),
        "list_training_runs": lambda: (3, 1),
        "list_user_checkpoints": lambda: (3, 1),
        "publish_checkpoint_from_tinker_path": lambda: (saved,),
        "set_checkpoint_ttl_from_tinker_path": lambda: (saved, 7200),
        "unpublish_checkpoint_from_tinker_path": lambda: (saved,),
    }


def asked(seen: Seen) -> tuple[object, ...]:
    """A request without its numbers and ids, which differ from call to call."""
    body = seen.body.decode("latin-1")
    if "protobuf" in seen.headers.get("content-type", ""):
        body = json.dumps(MessageToDict(pb.ForwardBackwardRequest.FromString(seen.body)), sort_keys=True)
    plain = [re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+", "#", text) for text in (seen.path, body)]
    return seen.method, *plain, seen.headers.get("content-type"), seen.headers["accept"], seen.status


async def call_async(method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answer = await method(*arguments)
    if isinstance(answer, tinker.APIFuture):
        await answer


@pytest.mark.parametrize("kind", ["training", "service", "sampling", "rest", "admin"])
def test_109_async_twins_send_the_same(
    fake: Running, wire: Wire, client: tinker.ServiceClient, training: tinker.TrainingClient, kind: str
) -> None:
    address: dict[str, Any] = {"base_url": fake.url, "api_key": "tml-test"}
    rest = tinker.RestClient(**address)
    sampler = client.create_sampling_client(base_model="tiny").result()
    sampler_id = rest.get_session(client.holder.get_session_id()).result().sampler_ids[0]
    one: object
    one, arguments = {
        "training": lambda: (training, of_training(training)),
        "service": lambda: (client, of_service(training)),
        "sampling": lambda: (sampler, of_sampling()),
        "rest": lambda: (rest, of_rest(training, sampler_id)),
        "admin": lambda: (tinker.AdminClient(**address), of_admin()),
    }[kind]()
    twins = {member.removesuffix("_async") for member in dir(one) if re.fullmatch(r"[a-z]\w*_async", member)}
    assert twins == arguments.keys(), "a twin without arguments to try it with, or the other way round"
    for method in sorted(twins):
        make = arguments[method]
        given = [make(), make()]
        with wire.recording() as requests:
            answer = getattr(one, method)(*given[0])
            if isinstance(answer, tinker.APIFuture):
                answer.result()
        plain = [asked(seen) for seen in requests() if seen.path != CONFIG]
        with wire.recording() as requests:
            asyncio.run(call_async(getattr(one, f"{method}_async"), given[1]))
        assert [asked(seen) for seen in requests() if seen.path != CONFIG] == plain, method
        assert all(seen[-1] in (200, 204) for seen in plain), method
        assert plain or method in ("get_info", "get_base_model"), method
