"""Code that does what a page shows, with this server's address: SDK, openai and curl."""

import json
from dataclasses import dataclass

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SamplingParams
from tinker_server.api_schemas.weights import Kind

_ANY_KEY = '"tml-local"'


@dataclass(frozen=True)
class Draw:
    """A sample that can be drawn again."""

    base_model: str
    model_path: str | None
    prompt: ModelInput
    params: SamplingParams
    num_samples: int

    @property
    def model(self) -> str:
        """The weights by their name."""
        return self.model_path or self.base_model


@dataclass(frozen=True)
class Code:
    """Writes code for one server."""

    address: str
    """As the viewer's browser has it."""
    needs_key: bool
    """False: any key that begins with tml- is accepted."""

    @property
    def service(self) -> str:
        """Two lines of the SDK: its import, and a client of this server."""
        key = "" if self.needs_key else f", api_key={_ANY_KEY}"
        return f'import tinker\nservice = tinker.ServiceClient(base_url="{self.address}"{key})\n'

    def fork(self, path: str, kind: Kind) -> str:
        """Return three lines that train on from saved weights, with their optimizer where they have it."""
        method = "create_training_client_from_state" + ("_with_optimizer" if kind == "weights" else "")
        return f"{self.service}training = service.{method}({json.dumps(path)}).result()\n"

    def sample(self, draw: Draw) -> dict[str, str]:
        """Return programs that draw a sample again, by their kind."""
        found = {"SDK": self._by_sdk(draw)}
        if all(isinstance(chunk, EncodedTextChunk) for chunk in draw.prompt.chunks):
            found |= {"openai": self._by_openai(draw)}
            body, key = json.dumps(_completion(draw)), "$TINKER_API_KEY" if self.needs_key else "tml-local"
            quoted, url = body.replace("'", "'\\''"), f"{self.address}/oai/api/v1/completions"
            found |= {"curl": f"curl -s {url} \\\n  -H \"Authorization: Bearer {key}\" -d '{quoted}'\n"}
        return found

    def _by_sdk(self, draw: Draw) -> str:
        weights = "base_model" if draw.model_path is None else "model_path"
        set_params = draw.params.model_dump(exclude_defaults=True, exclude_none=True)
        params = ", ".join(f"{name}={value!r}" for name, value in set_params.items())
        has_images = any(isinstance(chunk, ImageChunk) for chunk in draw.prompt.chunks)
        return (
            f"{'import pathlib' + chr(10) if has_images else ''}{self.service}"
            f"sampler = service.create_sampling_client({weights}={json.dumps(draw.model)}).result()\n"
            f"{_prompt(draw)}"
            f"params = tinker.types.SamplingParams({params})\n"
            f"answer = sampler.sample(prompt, num_samples={draw.num_samples}, sampling_params=params).result()\n"
            "print(*(sequence.tokens for sequence in answer.sequences), sep='\\n')\n"
        )

    def _by_openai(self, draw: Draw) -> str:
        key = 'os.environ["TINKER_API_KEY"]' if self.needs_key else _ANY_KEY
        settings = ", ".join(f"{name}={value!r}" for name, value in _completion(draw).items())
        return (
            f"{'import os' + chr(10) if self.needs_key else ''}import openai\n"
            f'client = openai.OpenAI(base_url="{self.address}/oai/api/v1", api_key={key})\n'
            f"print(client.completions.create({settings}).choices)\n"
        )


def _completion(draw: Draw) -> dict[str, object]:
    """Return the sample as a request for a completion of its tokens."""
    set_params = draw.params.model_dump(exclude_defaults=True, exclude_none=True)
    tokens = [token for chunk in draw.prompt.chunks if isinstance(chunk, EncodedTextChunk) for token in chunk.tokens]
    asked: dict[str, object] = {"model": draw.model, "prompt": [int(token) for token in tokens]}
    return asked | {"n": draw.num_samples} | set_params


def _prompt(draw: Draw) -> str:
    """Return lines that make the prompt. Its images are read from files, which the page has."""
    chunks = draw.prompt.chunks
    if len(chunks) == 1 and isinstance(chunks[0], EncodedTextChunk):
        return f"prompt = tinker.types.ModelInput.from_ints({chunks[0].tokens.tolist()})\n"
    lines, num_images = [], 0
    for chunk in chunks:
        if isinstance(chunk, EncodedTextChunk):
            lines.append(f"    tinker.types.EncodedTextChunk(tokens={chunk.tokens.tolist()}),\n")
        elif isinstance(chunk, ImageChunk):
            num_images += 1
            data = f'pathlib.Path("image-{num_images}.{chunk.format}").read_bytes()'
            lines.append(f'    tinker.types.ImageChunk(data={data}, format="{chunk.format}"),\n')
    return f"prompt = tinker.types.ModelInput(chunks=[\n{''.join(lines)}])\n"
