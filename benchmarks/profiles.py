"""Accuracy of the shipped profiles against public timings of operators, where these are available.

    python -m benchmarks.profiles [FOLDER]       FOLDER: ../shared/data/profiles by default

Compares measured and predicted time of a layer without its attention, for every batch size and
shard count in FOLDER's files, on the third of batch sizes that no coefficient was fitted to. Also
shows the limit of any law: the nearest times that only grow with the batch, drawn through each
shard count's timings, and the spread between timings of one batch. The project keeps coefficients
only, no timings. Exits with 2 if there are none.
"""

from __future__ import annotations

import csv
import pathlib
import sys

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from medha.calibration import Operator, operator_s
from medha.model import ModelShape
from medha.predictor import Costs
from medha.profile import SHIPPED, Profile
from medha.topology import Topology

TIMINGS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data" / "profiles"
LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
# Profile, file, the largest batch for which the profile was fitted, and the layers of the model.
FILES = (
    ("a100", "a100_Meta-Llama-3-8B_mlp.csv", 8192, 32),
    ("a100", "a100_Meta-Llama-3-70B_mlp.csv", 8192, 80),
    ("h100", "h100_Llama-2-70b_mlp.csv", 4096, 80),
)
WANTED = 0.08

Floats = npt.NDArray[np.float64]


class Timings:
    """Rows and shards of each batch in a file, with measured and predicted seconds per layer."""

    def __init__(self, profile: Profile, file: pathlib.Path, most_rows: int) -> None:
        costs: dict[str, Costs] = {}
        rows, shards, measured, predicted = [], [], [], []
        with file.open() as lines:
            for row in csv.DictReader(lines):
                count, tp = int(row["num_tokens"]), row["num_tensor_parallel_workers"]
                if count > most_rows:
                    continue
                if tp not in costs:
                    costs[tp] = Costs(profile, shape_of(row), Topology(tp=int(tp)))
                parts = (Operator("linear", count), Operator("elementwise", count))
                taken = (float(row[f"time_stats.{name}.median"]) for name in LINEAR + ELEMENTWISE)
                measured.append(1e-3 * sum(taken))
                predicted.append(sum(operator_s(part, costs[tp]) for part in parts))
                rows.append(count)
                shards.append(int(tp))
        self.rows, self.shards = np.array(rows), np.array(shards)
        self.measured, self.predicted = np.array(measured), np.array(predicted)

    @property
    def unseen(self) -> npt.NDArray[np.bool_]:
        """Batches that no coefficient was fitted to: every third size, others for each shard."""
        which: npt.NDArray[np.bool_] = (self.rows // 8 + self.shards) % 3 == 0
        return which

    @property
    def errors(self) -> Floats:
        """|predicted / measured − 1|."""
        off: Floats = np.abs(self.predicted / self.measured - 1.0)
        return off

    @property
    def floor(self) -> Floats:
        """Errors of the best times that only grow with the rows."""
        errors = np.zeros(len(self.rows))
        for tp in np.unique(self.shards):
            (at,) = np.nonzero(self.shards == tp)
            at = at[np.argsort(self.rows[at], kind="stable")]
            logs = np.log(self.measured[at])
            errors[at] = np.abs(np.exp(growing(logs) - logs) - 1.0)
        return errors

    @property
    def repeated(self) -> float:
        """Largest spread between timings of a batch that was timed twice."""
        apart = 0.0
        for tp in np.unique(self.shards):
            for count in np.unique(self.rows):
                times = self.measured[(self.shards == tp) & (self.rows == count)]
                apart = max(apart, times.max() / times.min() - 1.0) if len(times) else apart
        return apart

    def good_from(self, layers: int) -> tuple[int, float]:
        """(rows, seconds of `layers` on one shard) of the least batch from which on 95 % of the
        unseen batches are as near as wanted."""
        for count in np.unique(self.rows):
            if np.quantile(self.errors[self.unseen & (self.rows >= count)], 0.95) <= WANTED:
                took = self.measured[(self.rows == count) & (self.shards == 1)]
                return int(count), layers * float(np.median(took))
        return int(self.rows.max()), float("nan")


def shape_of(row: dict[str, str]) -> ModelShape:
    """Return a layer's shape of the model in a file's row."""
    return ModelShape(
        layers=1,
        hidden=int(row["n_embd"]),
        heads=int(row["n_head"]),
        kv_heads=int(row["n_kv_head"]),
        head_dim=128,
        intermediate=int(row["n_expanded_embd"]),
        vocab=int(row["vocab_size"]),
    )


def growing(values: Floats) -> Floats:
    """Return the nearest non-decreasing values, by least squares."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            whole = counts[-1] + count
            means[-1] = (means[-1] * counts[-1] + mean * count) / whole
            counts[-1] = whole
    return np.repeat(means, counts)


def main() -> int:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TIMINGS
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is no folder of timings: name one\n")
        return 2
    table = Table(title="Shipped profiles against public timings: a layer without its attention")
    for column in (
        "profile",
        "timings",
        "unseen",
        "mean",
        "p95",
        "worst",
        "all together",
        "p95 of the best that grows",
        "one batch twice",
        f"p95 ≤ {100 * WANTED:.0f} % from",
    ):
        table.add_column(column, justify="left" if column in ("profile", "timings") else "right")
    for name, file, most_rows, layers in FILES:
        if (folder / file).is_file():
            timings = Timings(SHIPPED[name], folder / file, most_rows)
            unseen = timings.unseen
            off = timings.errors[unseen]
            together = timings.predicted[unseen].sum() / timings.measured[unseen].sum() - 1.0
            parts = (off.mean(), np.quantile(off, 0.95), off.max(), together)
            rest = (np.quantile(timings.floor, 0.95), timings.repeated)
            rows, seconds = timings.good_from(layers)
            table.add_row(
                name,
                file,
                str(len(off)),
                *(f"{100 * part:.1f} %" for part in (*parts, *rest)),
                f"{rows} rows, {1e3 * seconds:.0f} ms",
            )
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
