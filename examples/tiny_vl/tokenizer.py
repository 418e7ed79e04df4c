"""Cut the genuine Qwen3 tokenizer down to a small vocabulary, keeping its special tokens and pre-tokenizer.

    python tokenizer.py QWEN3_TOKENIZER_JSON OUT_DIR

Kept are the 256 bytes, the first merges, and all merges on the way to the words of WORDS and of CalTech101: those
words are then cut into tokens exactly as by the whole tokenizer. Any other text is still spelled, only in more tokens.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tinker_server.embedded import DIRECTORIES, TINY_VL

VOCAB_SIZE = 2048
SPACE = "Ġ"  # how byte-level BPE writes a space
WORDS = """
What is the name of the subject in this photo? The subject in this photo is: a picture of one thing. Repeat these words
system user assistant tool You are a helpful assistant. Answer the question about the image.
airplanes motorbikes faces easy watch leopards bonsai car side ketch chandelier hawksbill
accordion anchor ant barrel bass beaver binocular brain brontosaurus buddha butterfly camera cannon ceiling fan
cellphone chair cougar body face crab crayfish crocodile head cup dalmatian dollar bill dolphin dragonfly electric
guitar elephant emu euphonium ewer ferry flamingo garfield gerenuk gramophone grand piano headphone hedgehog helicopter
ibis inline skate joshua tree kangaroo lamp laptop llama lobster lotus mandolin mayfly menorah metronome minaret
nautilus octopus okapi pagoda panda pigeon pizza platypus pyramid revolver rhino rooster saxophone schooner scissors
scorpion sea horse snoopy soccer ball stapler starfish stegosaurus stop sign strawberry sunflower tick trilobite
umbrella water lilly wheelchair wild cat windsor wrench yin yang
I can see it. There are two people, three dogs and four houses; How many of them? Which colour has the square circle
red green blue yellow black white left right above below small large yes no other would be think first then give answer
Describe the photograph short sentence shows water sky trees night day animal bird boat ship flower instrument machine
zero one two three four five six seven eight nine ten who when where why not with and or for from to an his her their
hello world good bad new old man woman child dog house road hand eye food fruit apple table book phone computer
"""
Merge = tuple[str, str]


def merges_of(word: str, ranks: dict[Merge, int]) -> list[Merge]:
    """The merges by which byte-level BPE builds `word`, in order."""
    parts = list(word)
    used: list[Merge] = []
    while True:
        pairs = [pair for pair in pairwise(parts) if pair in ranks]
        if not pairs:
            return used
        best = min(pairs, key=ranks.__getitem__)
        used.append(best)
        joined: list[str] = []
        for part in parts:
            if joined and (joined[-1], part) == best:
                joined[-1] += part
            else:
                joined.append(part)
        parts = joined


def kept_merges(merges: list[Merge], count: int) -> list[Merge]:
    """`count` merges in their old order: those that the words need, then the first ones."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    kept: set[Merge] = set()
    for word in {word.strip(".?,;:") for word in WORDS.split()}:
        for spelling in (word, SPACE + word):
            kept.update(merges_of(spelling, ranks))
    for merge in merges:
        if len(kept) >= count:
            break
        kept.add(merge)
    return sorted(kept, key=ranks.__getitem__)


def prune(whole: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The content of the small tokenizer.json. A merge needs its parts, and merges are kept with theirs."""
    model = whole["model"]
    merges: list[Merge] = [
        (first, second)
        for merge in model["merges"]
        for first, second in [merge.split(" ") if isinstance(merge, str) else merge]
    ]
    results = {"".join(merge) for merge in merges}
    alphabet = [token for token in model["vocab"] if token not in results]
    assert len(alphabet) == 256
    special = whole["added_tokens"]
    kept = kept_merges(merges, vocab_size - len(alphabet) - len(special))
    tokens = alphabet + ["".join(merge) for merge in kept]
    first_special = len(tokens)
    return whole | {
        "model": model | {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": [list(m) for m in kept]},
        "added_tokens": [token | {"id": first_special + i} for i, token in enumerate(special)],
    }


def make_tokenizer(qwen_json: Path) -> PreTrainedTokenizerFast:
    small = prune(json.loads(qwen_json.read_text()), VOCAB_SIZE)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(small)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token["content"] for token in small["added_tokens"] if token["special"]],
        model_max_length=4096,
    )
    tokenizer.chat_template = (DIRECTORIES[TINY_VL] / "chat_template.jinja").read_text()
    return tokenizer


if __name__ == "__main__":
    made = make_tokenizer(Path(sys.argv[1]))
    made.save_pretrained(sys.argv[2])
    print(f"{sys.argv[2]}: {len(made)} tokens")
