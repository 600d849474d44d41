"""How well the shipped profiles predict public timings of operators, where these are at hand.

    python benchmarks/profiles.py [FOLDER]       FOLDER: ../shared/data/profiles unless named

Compares what a layer of a model takes but for its attention, at every batch size and every number
of shards in the files of FOLDER, with what the profile says. Only coefficients are kept in the
project, none of the timings. Exits with 2 where there are no timings.
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
from medha.costs import Costs
from medha.model import ModelShape
from medha.profile import SHIPPED, Profile
from medha.topology import Topology

TIMINGS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data" / "profiles"
LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
# Profile, file, and the largest batch for which the profile was fitted.
FILES = (
    ("a100", "a100_Meta-Llama-3-8B_mlp.csv", 8192),
    ("a100", "a100_Meta-Llama-3-70B_mlp.csv", 8192),
    ("h100", "h100_Llama-2-70b_mlp.csv", 4096),
)


def errors(profile: Profile, file: pathlib.Path, most_rows: int) -> npt.NDArray[np.float64]:
    """|predicted / measured − 1| of a layer's products and all that is elementwise, by row of the
    file."""
    found = []
    costs: dict[str, Costs] = {}
    with file.open() as lines:
        for row in csv.DictReader(lines):
            rows, tp = int(row["num_tokens"]), row["num_tensor_parallel_workers"]
            if rows > most_rows:
                continue
            if tp not in costs:
                shape = ModelShape(
                    layers=1, hidden=int(row["n_embd"]), heads=int(row["n_head"]),
                    kv_heads=int(row["n_kv_head"]), head_dim=128,
                    intermediate=int(row["n_expanded_embd"]), vocab=int(row["vocab_size"]),
                )  # fmt: skip
                costs[tp] = Costs(profile, shape, Topology(tp=int(tp)))
            measured_ms = sum(
                float(row[f"time_stats.{name}.median"]) for name in LINEAR + ELEMENTWISE
            )
            parts = (Operator("linear", rows), Operator("elementwise", rows))
            predicted = sum(operator_s(part, costs[tp]) for part in parts)
            found.append(1e3 * predicted / measured_ms - 1.0)
    return np.abs(found)


def main() -> int:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TIMINGS
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is no folder of timings: name one\n")
        return 2
    table = Table(title="Shipped profiles beside public timings: a layer without its attention")
    for column in ("profile", "timings", "batches", "mean", "p95", "worst"):
        table.add_column(column, justify="left" if column in ("profile", "timings") else "right")
    for name, file, most_rows in FILES:
        if (folder / file).is_file():
            off = errors(SHIPPED[name], folder / file, most_rows)
            shown = (off.mean(), np.quantile(off, 0.95), off.max())
            table.add_row(name, file, str(len(off)), *(f"{100 * part:.1f} %" for part in shown))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
