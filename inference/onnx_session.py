"""An exported model in onnxruntime: what a program without PyTorch does with an ONNX graph.

    session = Session("FOLDER")
    session.generate([[5, 6, 7]], max_tokens=20)

It holds the cache between two steps, pads the prompts of a batch, and chooses the most likely
tokens. numpy and onnxruntime are all that it needs.

    python -m inference.export run FOLDER --prompt "def "
"""

import importlib.util
from pathlib import Path

import numpy as np

from base.errors import InputError


class ExportError(InputError):
    """What cannot be exported or run; the message says why, and what would fit."""


def need(*packages: str) -> None:
    """Raises ExportError where a package is not installed."""
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        raise ExportError(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


# The types of inputs, as onnxruntime names them.
TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


class Session:
    """An exported model in onnxruntime, and the cache of one batch."""

    def __init__(self, folder: Path | str):
        """Raises ExportError."""
        need("onnxruntime")
        import onnxruntime

        path = Path(folder) / "model.onnx"
        if not path.is_file():
            raise ExportError(
                f"{folder} has no model.onnx: a folder of inference/export.py would fit"
            )
        try:
            self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            facts = self.session.get_modelmeta().custom_metadata_map
            self.seq_length, self.window = int(facts["seq_length"]), int(facts["window"])
            self.tokenizer = facts["tokenizer"]
        # Onnxruntime's errors have no class in common.
        except Exception as e:
            raise ExportError(f"{path} cannot be run: {e}") from None
        self.inputs = [node for node in self.session.get_inputs() if node.name.startswith("past")]
        self.past: dict[str, np.ndarray] = {}

    def begin(self, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Empty the cache. Returns (tokens, positions) of a prefill, [b, s] each."""
        sizes = {"batch": len(prompts), "past": 0}
        for node in self.inputs:
            shape = [sizes.get(size, size) for size in node.shape]
            self.past[node.name] = np.zeros(shape, TYPES[node.type])
        s = max(map(len, prompts))
        tokens = np.zeros((len(prompts), s), np.int64)
        positions = np.full_like(tokens, self.seq_length)
        for row, ids in enumerate(prompts):
            tokens[row, s - len(ids) :] = ids
            positions[row, s - len(ids) :] = range(len(ids))
        return tokens, positions

    def forward(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """tokens, positions: [b, s] int64 -> logits [b, V] of the last column. Fills the cache."""
        feed = {"tokens": tokens, "positions": positions} | self.past
        logits, *present = self.session.run(None, feed)
        for node, x in zip(self.inputs, present):
            axis = node.shape.index("past")
            # A window ends with the next token, so one column less is kept before it.
            gone = max(0, x.shape[axis] - (self.window - 1)) if self.window else 0
            self.past[node.name] = np.delete(x, slice(gone), axis) if gone else x
        return logits

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stop_ids: tuple[int, ...] = ()
    ) -> list[list[int]]:
        """The most likely tokens after each prompt, up to one of `stop_ids` or the end of the
        context."""
        tokens, positions = self.begin(prompts)
        new = [[] for _ in prompts]
        unfinished = list(range(len(prompts)))
        while unfinished and max_tokens:
            max_tokens -= 1
            tokens = self.forward(tokens, positions).argmax(-1)[:, None]  # [b, 1]
            positions = positions[:, -1:] + 1
            unfinished = [row for row in unfinished if tokens[row, 0] not in stop_ids]
            for row in unfinished:
                new[row].append(int(tokens[row, 0]))
            unfinished = [row for row in unfinished if positions[row, 0] < self.seq_length]
        return new
