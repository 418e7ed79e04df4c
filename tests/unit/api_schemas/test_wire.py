"""Protobuf and JSON forms of the wire types, against the SDK's own encoders and decoders."""

from typing import Any

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from tests.factories import as_image, as_text, photo
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.base import MAX_TEXT
from tinker_server.api_schemas.inputs import ImageChunk, TensorData
from tinker_server.api_schemas.protobuf_fields import encode_varint
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepRequest


def encoded(**changes: Any) -> pb.ForwardBackwardRequest:
    datum = pb.Datum(
        model_input=[
            pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([5, 6], "<i4").tobytes())),
            pb.Chunk(image=pb.ImageChunk(data=photo(40, 40), format="png", expected_tokens=4)),
        ],
        loss_fn_inputs={
            "weights": pb.Tensor(dense=np.ones(6, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[6]),
            "target_tokens": pb.Tensor(
                sparse_csr=pb.SparseCsr(
                    values=np.array([7, 8], "<i8").tobytes(),
                    crow_indices=np.array([0, 1, 1, 2], "<i8").tobytes(),
                    col_indices=np.array([1, 0], "<i8").tobytes(),
                ),
                dtype=pb.DTYPE_INT64,
                shape=[3, 2],
            ),
        },
    )
    return pb.ForwardBackwardRequest(model_id="m", seq_id=3, data=[datum], loss_fn="ppo", **changes)


def test_a_request_decodes_to_what_was_sent():
    message = encoded(forward_only=True)
    message.loss_fn_config_v2["beta"].number = 0.5
    message.loss_fn_config_v2["name"].text = "x"
    request = wire.decode_forward_backward(message.SerializeToString())
    assert (request.model_id, request.seq_id, request.forward_only) == ("m", 3, True)
    work = request.forward_backward_input
    assert (work.loss_fn, work.loss_fn_config) == ("ppo", {"beta": 0.5, "name": "x"})
    text, image = work.data[0].model_input.chunks
    assert as_text(text).tokens.tolist() == [5, 6]
    assert (as_image(image).data, as_image(image).expected_tokens) == (photo(40, 40), 4)
    assert work.data[0].loss_fn_inputs["weights"].tolist() == [1.0] * 6
    assert work.data[0].loss_fn_inputs["target_tokens"].tolist() == [[0, 7], [0, 0], [8, 0]]


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_body_that_was_accepted_decodes_to_the_same_input_without_its_bounds(forward_only: bool) -> None:
    message = encoded(forward_only=forward_only)
    message.loss_fn_config["beta"] = 0.5
    for body in (message.SerializeToString(), large().SerializeToString()):
        wanted = wire.decode_forward_backward(body).forward_backward_input
        found = wire.decode_checked(body)
        assert type(found) is type(wanted) and found.model_dump_json() == wanted.model_dump_json()
    message.loss_fn = "x" * (MAX_TEXT + 1)
    message.data[0].loss_fn_inputs["y" * (MAX_TEXT + 1)].CopyFrom(message.data[0].loss_fn_inputs["weights"])
    with pytest.raises(wire.MalformedBody):
        wire.decode_forward_backward(message.SerializeToString())
    found = wire.decode_checked(message.SerializeToString())
    assert len(found.loss_fn) > MAX_TEXT and len(found.data[0].loss_fn_inputs) == 3


@pytest.mark.parametrize("format", ["gif", "", "PNG"])
def test_an_image_of_another_format_is_refused_by_its_datum(format: str) -> None:
    chunk = pb.Chunk(image=pb.ImageChunk(data=photo(8, 8), format=format))
    message = pb.ForwardBackwardRequest(model_id="m", data=[pb.Datum(), pb.Datum(model_input=[chunk])])
    with pytest.raises(wire.MalformedBody, match="datum 1: image: format must be png or jpeg"):
        wire.decode_forward_backward(message.SerializeToString())


@pytest.mark.parametrize("expected", [None, 0, 4])
def test_no_expected_tokens_and_none_expected_are_told_apart(expected: int | None) -> None:
    image = pb.ImageChunk(data=photo(40, 40), format="png", expected_tokens=expected)
    message = pb.ForwardBackwardRequest(model_id="m", data=[pb.Datum(model_input=[pb.Chunk(image=image)])])
    request = wire.decode_forward_backward(message.SerializeToString())
    (chunk,) = request.forward_backward_input.data[0].model_input.chunks
    assert as_image(chunk).expected_tokens == expected
    for name in ("expected_tokens", "tokens"):  # the second is that of older SDKs
        chunks = [{"data": "aGk=", "format": "png", name: expected}]
        sample = SampleRequest.model_validate({"prompt": {"chunks": chunks}, "sampling_params": {}})
        assert as_image(sample.prompt.chunks[0]).expected_tokens == expected


def large() -> pb.ForwardBackwardRequest:
    """Two datums that are parsed in pieces, and one that is not."""
    message = encoded(forward_only=True)
    message.loss_fn_config_v2["beta"].number = 0.5
    message.data.extend(message.data[:1] * 2)
    for datum, size in ((message.data[0], 200_000), (message.data[2], 600_000)):
        for name in ("b", "é", "advantages"):
            datum.loss_fn_inputs[name].CopyFrom(
                pb.Tensor(dense=np.full(size, len(name), "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[size])
            )
        datum.loss_fn_input_spans.add().prompt_tokens.sequence_id = "s"
        datum.model_input.add().encoded_text.tokens = np.arange(size, dtype="<i4").tobytes()
    return message


def test_a_large_request_is_parsed_in_pieces_to_the_same_message_and_has_the_same_canonical_form():
    message = large()
    for deterministic in (True, False):
        body = message.SerializeToString(deterministic=deterministic)
        request = wire.decode_forward_backward(body)
        assert (request.model_id, request.seq_id, request.forward_only) == ("m", 3, True)
        for datum, sent in zip(request.forward_backward_input.data, message.data, strict=True):
            assert set(datum.loss_fn_inputs) == set(sent.loss_fn_inputs)
            assert datum.loss_fn_inputs["weights"].tolist() == [1.0] * 6
            for name in set(sent.loss_fn_inputs) - {"weights", "target_tokens"}:
                assert datum.loss_fn_inputs[name].tobytes() == sent.loss_fn_inputs[name].dense
            assert [getattr(chunk, "type", None) for chunk in datum.model_input.chunks] == [
                sent_chunk.WhichOneof("chunk") for sent_chunk in sent.model_input
            ]
            assert as_text(datum.model_input.chunks[-1 if len(sent.model_input) > 2 else 0]).tokens.tobytes() == (
                sent.model_input[-1 if len(sent.model_input) > 2 else 0].encoded_text.tokens
            )
        assert b"".join(wire.canonical(body)) == message.SerializeToString(deterministic=True)


def test_the_canonical_form_does_not_depend_on_the_order_in_which_a_map_came():
    """A later entry of the same name replaces an earlier one, as protobuf's own parser does."""
    datum = large().data[0]
    datum.loss_fn_inputs["bb"].CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0]))
    entries = [
        pb.Datum(loss_fn_inputs={name: tensor}).SerializeToString() for name, tensor in datum.loss_fn_inputs.items()
    ]
    replaced = pb.Datum(loss_fn_inputs={"b": pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0])}).SerializeToString()
    forms = set()
    for contents in ([replaced, *entries], entries[::-1]):
        content = b"".join(contents)
        body = bytes([3 << 3 | 2]) + encode_varint(len(content)) + content
        forms.add(b"".join(wire.canonical(body)))
        assert len(wire.decode_forward_backward(body).forward_backward_input.data[0].loss_fn_inputs["b"]) == 200_000
    (form,) = forms
    assert pb.ForwardBackwardRequest.FromString(form).data[0] == pb.Datum(loss_fn_inputs=datum.loss_fn_inputs)


LONG = np.arange(1 << 18, dtype="<i8")
"""Two megabytes."""


@pytest.mark.parametrize("model_id", ["m", "mm", "mmm", "mmmm"])
def test_long_byte_strings_are_read_wherever_they_begin(model_id: str) -> None:
    photograph = photo(64, 64) + bytes(3 << 20)
    rows = np.arange(0, len(LONG) + 1, 1024, dtype="<i8").tobytes()
    sparse = pb.SparseCsr(values=LONG.tobytes(), crow_indices=rows, col_indices=(LONG % 1024).tobytes())
    shape = [256, 1024]
    datum = pb.Datum(
        model_input=[
            pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=LONG.astype("<i4").tobytes() * 2)),
            pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=LONG[:3].astype("<i4").tobytes())),
            pb.Chunk(image=pb.ImageChunk(data=photograph, format="png", expected_tokens=4)),
        ],
        loss_fn_inputs={
            "dense": pb.Tensor(dense=LONG.tobytes(), dtype=pb.DTYPE_INT64, shape=shape),
            "sparse": pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_INT64, shape=shape),
            "short": pb.Tensor(dense=LONG[:4].tobytes(), dtype=pb.DTYPE_INT64, shape=[4]),
        },
    )
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=3, data=[pb.Datum(), datum], loss_fn="ppo")
    body = message.SerializeToString()
    for found in (wire.decode_forward_backward(body).forward_backward_input, wire.decode_checked(body)):
        assert found.data[0].model_input.chunks == []
        long, short, image = found.data[1].model_input.chunks
        assert as_text(long).tokens.tolist() == LONG.tolist() * 2 and as_text(long).tokens.flags.aligned
        assert as_text(short).tokens.tolist() == [0, 1, 2]
        assert as_image(image) == ImageChunk(data=photograph, format="png", expected_tokens=4)
        inputs = found.data[1].loss_fn_inputs
        assert inputs["dense"].tolist() == inputs["sparse"].tolist() == LONG.reshape(shape).tolist()
        assert inputs["dense"].flags.aligned and inputs["short"].tolist() == [0, 1, 2, 3]
    assert b"".join(wire.canonical(body)) == message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("sizes", [(len(LONG), 3), (3, len(LONG)), (len(LONG) - 1, len(LONG))])
def test_of_two_tensors_of_one_name_the_later_counts_however_long(sizes: tuple[int, int]) -> None:
    content = b"".join(
        pb.Datum(
            model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=LONG.tobytes()))],
            loss_fn_inputs={"a": pb.Tensor(dense=LONG[:size].tobytes(), dtype=pb.DTYPE_INT64, shape=[size])},
        ).SerializeToString()
        for size in sizes
    )
    body = bytes([3 << 3 | 2]) + encode_varint(len(content)) + content
    datum = wire.decode_forward_backward(body).forward_backward_input.data[0]
    assert len(datum.model_input.chunks) == 2
    assert datum.loss_fn_inputs["a"].tolist() == LONG[: sizes[1]].tolist()


def field_of(number: int, content: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


TEXT, SHORT_TEXT, PNG = field_of(1, LONG.tobytes()), field_of(1, LONG[:3].tobytes()), field_of(2, b"png")


@pytest.mark.parametrize(
    "parts",
    [
        [field_of(1, TEXT), field_of(1, SHORT_TEXT)],
        [field_of(1, SHORT_TEXT), field_of(1, TEXT), field_of(1, b"")],
        [field_of(1, TEXT), field_of(2, PNG), field_of(1, b"")],
        [field_of(2, field_of(1, LONG.tobytes())), field_of(2, PNG)],
        [field_of(2, PNG + field_of(1, LONG.tobytes())), field_of(2, field_of(1, b"short"))],
    ],
)
def test_parts_of_a_chunk_are_merged_as_protobuf_merges_them(parts: list[bytes]) -> None:
    content = b"".join(parts)
    wanted = pb.Chunk.FromString(content)
    request = wire.decode_forward_backward(field_of(3, field_of(1, content)))
    (found,) = request.forward_backward_input.data[0].model_input.chunks
    if wanted.WhichOneof("chunk") == "encoded_text":
        assert as_text(found).tokens.tobytes() == wanted.encoded_text.tokens
    else:
        assert (as_image(found).data, as_image(found).format) == (wanted.image.data, wanted.image.format)


def test_parts_of_a_tensor_are_merged_as_protobuf_merges_them() -> None:
    rows, columns = np.array([0, 1, 1], "<i8"), np.array([1], "<i8")
    first, short = pb.SparseCsr(values=LONG.tobytes(), crow_indices=rows.tobytes()), LONG[7:8].tobytes()
    second = pb.SparseCsr(values=short, col_indices=columns.tobytes())
    parts = [pb.Tensor(sparse_csr=part).SerializeToString() for part in (first, second)]
    shape = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[2, 2]).SerializeToString()
    entry = field_of(1, b"a") + field_of(2, parts[0] + shape) + field_of(2, parts[1])
    request = wire.decode_forward_backward(field_of(3, field_of(2, entry)))
    assert request.forward_backward_input.data[0].loss_fn_inputs["a"].tolist() == [[0, 7], [0, 0]]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (field_of(7, LONG.tobytes()), "model_input.0: field 7 of Chunk is not known here"),
        (field_of(2, field_of(9, LONG.tobytes())), "field 9 of ImageChunk is not known here"),
        (field_of(2, field_of(2, LONG.tobytes())), r"image\.format has 2097152 bytes; at most 1048576 are allowed"),
        (field_of(1, b"\x38\x01" * (1 << 20)), "encoded_text has more than 64 fields and 1048576 bytes"),
        (field_of(1, field_of(1, LONG.tobytes()) + b"\x38\x01"), "field 7 of EncodedTextChunk is not known here"),
    ],
)
def test_what_is_long_and_no_byte_string_is_refused_by_name(chunk: bytes, message: str) -> None:
    with pytest.raises(wire.MalformedBody, match=message):
        wire.decode_forward_backward(field_of(3, field_of(1, chunk)))


def test_a_tensor_in_many_parts_is_refused_before_they_are_read() -> None:
    entry = field_of(1, b"a") + field_of(2, b"") * MAX_TEXT * 2
    with pytest.raises(wire.MalformedBody, match="an entry of loss_fn_inputs has more than 64 fields and"):
        wire.decode_forward_backward(field_of(3, field_of(2, entry)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: setattr(t, "dense", b"123"), "datum 0: weights: data: 3 bytes are no whole number of float32"),
        (lambda t: t.shape.__setitem__(0, 7), r"datum 0: weights: a tensor of shape \[7\] needs 7 values, got 6"),
        (lambda t: t.shape.__setitem__(0, -6), "negative size"),
        (lambda t: setattr(t, "dtype", pb.DTYPE_BFLOAT16), "datum 0: weights: dtype must be"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_malformed(spoil, message):
    request = encoded()
    spoil(request.data[0].loss_fn_inputs["weights"])
    with pytest.raises(wire.MalformedBody, match=message):
        wire.decode_forward_backward(request.SerializeToString())


@pytest.mark.parametrize(
    ("crow", "col"),
    [
        ([0, 1, 2], [1, 0]),
        ([0, 2, 1, 2], [1, 0]),
        ([0, 1, 1, 2], [2, 0]),
        ([1, 1, 1, 2], [1, 0]),
        ([0, 0, 2, 2], [1, 1]),  # two values for a cell
    ],
)
def test_sparse_indices_that_contradict_the_shape_are_malformed(crow, col):
    request = encoded()
    sparse = request.data[0].loss_fn_inputs["target_tokens"].sparse_csr
    sparse.crow_indices = np.array(crow, "<i8").tobytes()
    sparse.col_indices = np.array(col, "<i8").tobytes()
    with pytest.raises(wire.MalformedBody, match="datum 0: target_tokens: sparse_"):
        wire.decode_forward_backward(request.SerializeToString())


@pytest.mark.parametrize("length", [1, 10, 60])
def test_a_body_cut_short_is_malformed_or_another_request_but_never_a_crash(length):
    body = encoded().SerializeToString()
    with pytest.raises(wire.MalformedBody):
        wire.decode_forward_backward(body[:-length])


def test_runs_of_sampled_sequences_come_in_their_order() -> None:
    message = encoded()
    (of_prompt, sampled) = (
        pb.TokenRun(sequence_id="r:1", length=4),
        pb.TokenRun(sequence_id="r:0", offset=7, length=2),
    )
    message.data[0].model_input_spans.add(prompt_tokens=of_prompt)
    message.data[0].model_input_spans.add(sampled_tokens=sampled)
    runs = wire.decode_forward_backward(message.SerializeToString()).forward_backward_input.data[0].model_input_spans
    assert [(run.part, run.sequence_id, run.offset, run.length) for run in runs] == [
        ("prompt", "r:1", 0, 4),
        ("sampled", "r:0", 7, 2),
    ]


@pytest.mark.parametrize(
    ("span", "named"),
    [
        (pb.ProvenanceSpan(), "a span is neither prompt_tokens nor sampled_tokens"),
        (pb.ProvenanceSpan(prompt_tokens=pb.TokenRun(length=1)), "prompt_tokens has sequence_id ''"),
        (pb.ProvenanceSpan(sampled_tokens=pb.TokenRun(sequence_id="r", length=0)), "sampled_tokens .* length 0"),
        (pb.ProvenanceSpan(sampled_tokens=pb.TokenRun(sequence_id="r", length=1, offset=-1)), "offset -1"),
    ],
)
def test_a_run_of_nothing_is_refused_by_name(span: pb.ProvenanceSpan, named: str) -> None:
    message = encoded()
    message.data[0].model_input_spans.append(span)
    with pytest.raises(wire.MalformedBody, match=f"datum 0: model_input_spans: .*{named}"):
        wire.decode_forward_backward(message.SerializeToString())


def test_zstd_is_undone_and_a_bomb_is_not():
    body = encoded().SerializeToString()
    assert wire.decompress(zstandard.compress(body), 1 << 20) == body
    with pytest.raises(wire.MalformedBody, match="grows past 1000 bytes"):
        wire.decompress(zstandard.compress(bytes(10**7)), 1000)
    with pytest.raises(wire.MalformedBody, match="corrupt"):
        wire.decompress(b"\x28\xb5\x2f\xfdnonsense", 1000)


@pytest.mark.heavy
def test_ragged_outputs_come_back_through_the_sdk():
    from tinker.proto.response_conv import deserialize_forward_backward_output

    rows = [np.arange(3, dtype=np.float32), np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)]
    output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": row} for row in rows], metrics={"loss:sum": 2.5})
    decoded = deserialize_forward_backward_output(wire.encode_forward_backward(output))
    assert decoded.metrics == {"loss:sum": 2.5}
    for got, row in zip(decoded.loss_fn_outputs, rows, strict=True):
        np.testing.assert_array_equal(got["logprobs"].to_numpy(), row)


def test_old_clients_may_leave_out_types_and_send_nulls():
    request = SampleRequest.model_validate_json(
        '{"prompt": {"chunks": [{"tokens": [1, 2]}, {"data": "aGk=", "format": "png", "expected_tokens": null}]},'
        ' "sampling_params": {"max_tokens": 3, "seed": null}, "num_samples": null}'
    )
    text, image = request.prompt.chunks
    assert (as_text(text).tokens.tolist(), as_image(image).data, request.num_samples) == ([1, 2], b"hi", 1)
    assert (
        OptimStepRequest.model_validate({"model_id": "m", "seq_id": 1, "adam_params": {}}).adam_params == AdamParams()
    )


def test_an_unknown_field_or_chunk_is_refused():
    with pytest.raises(ValidationError, match="learning_rat"):
        AdamParams.model_validate({"learning_rat": 1e-3})
    with pytest.raises(ValidationError, match="is no chunk"):
        SampleRequest.model_validate({"prompt": {"chunks": [{"type": "video"}]}, "sampling_params": {}})


def test_an_empty_stop_list_is_not_an_absent_one():
    empty = SampleRequest.model_validate({"prompt": {"chunks": []}, "sampling_params": {"stop": []}})
    absent = SampleRequest.model_validate({"prompt": {"chunks": []}, "sampling_params": {}})
    assert (empty.sampling_params.stop, absent.sampling_params.stop) == ([], None)


def test_sparse_json_tensors_are_filled():
    tensor = TensorData(
        data=[1.5], dtype="float32", shape=[2, 2], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[1]
    )
    assert tensor.to_array().tolist() == [[0, 0], [0, 1.5]]
    assert tensor.to_array(fill=-1).tolist() == [[-1, -1], [-1, 1.5]]
