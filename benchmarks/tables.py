"""Writes the measured tables of README and docs from benchmarks/results/*.json and from
experiments/*/results/*.json.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end table -->``. ``python
benchmarks/tables.py`` rewrites all of them; the tests check that they are up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import experiments
from benchmarks.distributed import modelled, modelled_sharded, ring, scatter, sharded_pass
from benchmarks.lds import table as lds
from experiments import overview

SINGLE = ("loss, mean", "AUM", "loss, end", "EL2N, all visits", "harm", "sum of values")
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gpu() -> str:
    """The GPU suite in two lines: worst relative error by precision and estimator."""
    data = results("gpu_suite")
    worst: dict[tuple[str, str], float] = {}
    for r in data["results"]:
        if "dtype" in r:
            key = r["dtype"], r["estimator"]
            worst[key] = max(worst.get(key, 0.0), r["relative_error"])
    models = len({r["model"] for r in data["results"] if "dtype" in r})
    loops = [r for r in data["results"] if "loop" in r]
    lines = ["| precision | estimator | largest relative error |", "|---|---|---|"]
    lines += [f"| {dtype} | {kind} | {error:.1e} |" for (dtype, kind), error in worst.items()]
    lines.append("")
    lines.append(
        f"{data['environment']['device']}, torch {data['environment']['torch']}: {models} models, "
        f"every form, {data['passed']} comparisons passed, {data['failed']} failed; training "
        f"bitwise unchanged in {sum(r['bitwise'] for r in loops)} of {len(loops)} loops."
    )
    return "\n".join(lines)


def demo() -> str:
    """The digits demo over five seeds, in a long and a short training."""
    runs = [results("demo"), results("demo-short")]
    ranks = {
        "harm": "harm", "secant": "sum of secant values", "tangent": "sum of tangent values",
        "sgd": "sum of SGD values", "loss": "final training loss",
    }  # fmt: skip
    left = {
        "all": "trained on everything", "random": "a random 10 % removed",
        "harm": "10 % of most harm removed",
    }  # fmt: skip
    titles = [f"{run['epochs']} epochs" for run in runs]
    lines = [f"| mean of {len(runs[0]['seeds'])} seeds | {titles[0]} (default) | {titles[1]} |"]
    lines.append("|---|---|---|")
    for key, name in ranks.items():
        cells = " | ".join(f"{run['mean']['auroc'][key]:.3f}" for run in runs)
        lines.append(f"| AUROC, {name} | {cells} |")
    for key, name in left.items():
        cells = " | ".join(f"{run['mean']['accuracy_after'][key]:.1%}" for run in runs)
        lines.append(f"| accuracy, {name} | {cells} |")
    return "\n".join(lines)


def numbers() -> str:
    """The four numbers of the README, each with its conditions and where it is worse."""
    lines = ["| | measured | where it is worse |", "|---|---|---|"]
    return "\n".join([*lines, _near_exact(), _adding_up(), _share_of_plain(), _flipped()])


def _near_exact() -> str:
    cells = experiments.load("fidelity").committed()["paper"]["summary"]["cells"]
    found = {c["stage"]: c["secant"] for c in cells if c["model"] == "gpt2-small"}
    R = {stage: x["R"]["mean"] for stage, x in found.items()}
    rates = experiments.load("learning-rates").committed()["paper"]["summary"]["cells"]
    worst = min(c["secant"]["R"] for c in rates if c["model"] == "gpt" and c["lr"] <= 1e-3)
    runs = results("first_steps")["runs"]
    first = [r["steps"][s]["shapley"] for r in runs for s in ("0", "1", "2")]
    lowest, largest = min(x["R"] for x in first), max(x["error"] for x in first)
    return (
        f"| **near exact Shapley values** | correlation {R['5–19']:.4f} at steps 5 to 19, "
        f"{R['100+']:.4f} from step 100 on, error {found['100+']['error']['mean']:.1%} (GPT-2 "
        "small, AdamW at 3e-4, batches of 10, all 1,024 coalitions, float64, one seed); at least "
        f"{lowest:.3f} at steps 0 to 2, error at most {largest:.0%} ({len(runs)} runs of small "
        "models) "
        f"| {R['0–4']:.2f} at steps 0 to 4 without sampled orders (`secant`); {worst:.2f} "
        "where the loss falls off a cliff within one step (byte-level GPT, 1e-3, step 20) |"
    )


def _adding_up() -> str:
    summary = experiments.load("adds-up").committed()["paper"]["summary"]
    share = {k: run["explained"]["secant"] for k, run in summary.items()}
    return (
        f"| **they add up** | {share['adamw-3e-4']:.1%} of what the batches did to the validation "
        "loss, over a whole run (byte-level GPT, AdamW at 3e-4) "
        f"| {share['adamw-1e-3']:.0%} at 1e-3; {share['nadam-1e-3']:.0%} with NAdam, "
        f"{share['rmsprop-1e-3']:.0%} with RMSprop at 1e-3, {share['sgd-1e-1']:.0%} with SGD at "
        "0.1 |"
    )


def _share_of_plain() -> str:
    wanted = [
        ("h200", "gpt2", "fast"), ("h200", "gpt2-compile", "fast"), ("h200", "batch-4", "fast"),
        ("cpu", "gpt-4x128", "bitwise"),
    ]  # fmt: skip
    runs = [(costs(device, name)[0][1], variant) for device, name, variant in wanted]
    eager, compiled, small, cpu = (_of(run, variant)["ratio"] for run, variant in runs)
    return (
        f"| **cost** | {eager:.0%} of plain throughput in eager mode, {compiled:.0%} under "
        "`torch.compile` (GPT-2 small, 16 × 1,024 tokens, bfloat16, every parameter, "
        '`training="fast"`, H200, a host that keeps up) '
        f"| {small:.0%} at batches of 4 (eager); {cpu:.0%} for a small GPT on two CPU cores, "
        '`"bitwise"`; the first steps, at most 100, take longer |'
    )


def _flipped() -> str:
    digits = results("demo")["mean"]["auroc"]
    text = experiments.load("mislabel").committed()["paper"]["summary"]
    found = text["SST-2, 3 epochs, 10% flipped"]["detectors"]
    harm, loss = (found[k]["auroc"]["mean"] for k in ("harm, secant", "loss, mean over epochs"))
    return (
        f"| **flipped labels found** | AUROC {digits['harm']:.3f}, by the final training loss "
        f"{digits['loss']:.3f} (10 % of digits flipped, ConvNet, 20 epochs, 5 seeds) "
        f"| {harm:.2f} on SST-2, 3 epochs, where the mean loss over epochs has {loss:.2f} |"
    )


def reproduced() -> dict[str, Callable[[], str]]:
    """The tables of the experiments, from their committed results."""
    loaded = [experiments.load(name) for name in experiments.EXPERIMENTS]
    return {
        name: lambda table=table, e=e: table(e.committed())  # type: ignore[misc]
        for e in loaded
        for name, table in e.tables.items()
    }


# docs/costs.md, from benchmarks/costs.py and benchmarks/cost_model.py

BANDWIDTH, RATE = 4.3e12, 790e12  # of an H200: bytes/s, and bf16 operations/s in matrix products


def costs(device: str, *names: str) -> list[tuple[str, dict[str, Any]]]:
    """The runs of these names that were measured."""
    path = RESULTS / f"costs-{device}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    return [(n, runs[n]) for n in names if "rows" in runs.get(n, {})]


def missing(device: str, script: str = "costs") -> str:
    place = "a CPU" if device == "cpu" else f"an {device.upper()}"
    return f"*Not measured yet: `python benchmarks/{script}.py` on {place} fills this table.*"


def measured_with(result: dict[str, Any], dates: Sequence[str] = ()) -> str:
    """``dates``: of all that was measured, where it is more than this."""
    days = ", ".join(sorted({date[:10] for date in dates or [result["date"]]}))
    hardware, torch = result["hardware"], result["versions"]["torch"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    note = f"; {result['note']}" if result.get("note") else ""
    return f"{where}, torch {torch}, {days}{note}."


def below(device: str, runs: list[tuple[str, dict[str, Any]]]) -> list[str]:
    whole = json.loads((RESULTS / f"costs-{device}.json").read_text())
    first, dates = runs[0][1], [run["date"] for _, run in runs]
    return ["", measured_with(first | {"note": whole["note"]}, dates)]


def percent(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


def headline(device: str, *names: str) -> str:
    """Time, throughput beside plain training and memory, by configuration and variant."""
    runs = costs(device, *names)
    if not runs:
        return missing(device)
    memory = any(row["peak_bytes"] for _, run in runs for row in run["rows"])
    head = ["model", "mode", "variant", "ms/step", "throughput of plain"]
    head += ["peak GB", "of plain"] if memory else []
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    modes = {"eager": "eager", "compile": "`torch.compile`"}
    for _, run in runs:
        for row in run["rows"]:
            cells = [run["options"]["model"], modes[row["mode"]], f"`{row['variant']}`"]
            if row["step_ms"] is None:
                cells += [row["status"], ""]
            else:
                cells += [f"{row['step_ms']['median']:.1f}", percent(row["ratio"])]
            if memory:
                peak = row["peak_bytes"]
                cells += [f"{peak / 1e9:.1f}" if peak else "", percent(row["memory_ratio"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *below(device, runs)])


def finetune() -> str:
    """Share of plain throughput at the sizes of fine-tuning, and the memory beside plain's."""
    runs = results("finetune-h200")["runs"]
    lines = [
        "| model | batch | mode | plain ms | `fast` | `bitwise` |",
        "|---|---|---|---:|---:|---:|",
    ]
    for run in runs:
        options, kind = run["options"], run["options"]["model"].removeprefix("hf:").split(",")
        lora = next((f", {x.replace('lora=', 'LoRA of rank ')}" for x in kind if "lora=" in x), "")
        size = f"{options['batch']}" + (f" × {options['length']}" if options["length"] > 1 else "")
        label = f"{kind[0]} ({run['parameters'] / 1e6:,.0f} M{lora})"
        rows = {row["variant"]: row for row in run["rows"]}
        kept = [
            f"{percent(r['ratio'])} ({r['memory_ratio']:.2f}×)" for r in list(rows.values())[1:]
        ]
        plain = f"{rows['plain']['step_ms']['median']:.1f}"
        lines.append(f"| {label} | {size} | {options['mode']} | {plain} | {' | '.join(kept)} |")
    return "\n".join([*lines, "", measured_with(runs[0], [run["date"] for run in runs])])


def host() -> str:
    """What a watched step costs the host, as a multiple of a plain one."""
    data = results("host-cpu")
    names = {"gpt2": "GPT-2", "llama": "Llama", "llama-lora": "Llama, LoRA of rank 4"}
    lines = [
        "| model | parameter tensors | plain ms | its validation pass | `fast` | `bitwise` "
        "| `fast`, mean | calls in Python, plain | `fast` | built-in, plain | `fast` |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, run in data["models"].items():
        rows, plain = run["variants"], run["variants"]["plain"]
        times = [run["validation_pass_ms"] / plain["ms"], rows["fast"]["of_plain"]]
        times += [rows["bitwise"]["of_plain"], rows["fast"]["mean_of_plain"]]
        cells = " | ".join(f"{x:.2f}" for x in times)
        calls = " | ".join(
            f"{rows[v]['calls'][k]:,}" for k in ("python", "built_in") for v in ("plain", "fast")
        )
        lines.append(
            f"| {names[name]} | {run['parameters']} | {plain['ms']:.1f} | {cells} | {calls} |"
        )
    return "\n".join([*lines, "", measured_with(data)])


def _suspect_cells() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The cells of benchmarks/suspects.py by task and kind of wrong labels, of all results."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in sorted(RESULTS.glob("suspects-*.json")):
        for c in json.loads(file.read_text())["cells"]:
            found.setdefault((c["task"], c["kind"]), []).append(c)
    return found


def suspects() -> str:
    """AUROC of run.suspects() and of the best rivals of each cell."""
    head = ("data", "wrong labels", "seeds", "suspects", "without values", "best single-run rival",
            "suspects minus that", "best with more trainings", "suspects minus that",
            "wrong among the first k, k wrong")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (task, kind), every in _suspect_cells().items():
        cells = [c for c in every if "auroc" in c]
        if not cells:
            continue
        names = dict.fromkeys(k for c in cells for k in c["auroc"])  # some cells lack the dear ones
        of = {k: [c["auroc"][k] for c in cells if k in c["auroc"]] for k in names}
        best = max(SINGLE, key=lambda k: mean(of[k]))
        others = [k for k in of if k not in SINGLE and not k.startswith("suspects")]
        more = max(others, key=lambda k: mean(of[k]), default=None)
        k, right = (sum(c["top k"][i] for c in cells) for i in (0, 1))
        columns = [task, kind, str(len(cells)), f"{mean(of['suspects']):.4f}",
                   f"{mean(of['suspects, without values']):.4f}", _rival(best, of),
                   _apart(best, cells), "–" if more is None else _rival(more, of),
                   "–" if more is None else _apart(more, cells), f"{right / k:.0%}"]  # fmt: skip
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _rival(name: str, of: dict[str, list[float]]) -> str:
    return f"{name} {mean(of[name]):.4f}{_spread(of[name])}"


def _apart(name: str, cells: Sequence[dict[str, Any]]) -> str:
    """Suspects minus a rival, seed by seed."""
    found = [c["auroc"]["suspects"] - c["auroc"][name] for c in cells if name in c["auroc"]]
    return f"{mean(found):+.4f}{_spread(found)}"


def _spread(x: Sequence[float]) -> str:
    return f" ± {_error(x):.4f}" if len(x) > 1 else ""


def suspects_confidence() -> str:
    """The stated least share of wrong labels beside the real one, lowest and mean over seeds."""
    lines = ["| data | wrong labels | k = 20 | 50 | 100 | 200 | at most above the real share | "
             "at least half wrong |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (task, kind), cells in _suspect_cells().items():
        each = [c["confidence"] for c in cells if "confidence" in c]
        if not each:
            continue
        by_k = zip(*(c["stated"] for c in each), strict=True)
        pairs = [f"{mean(x[1] for x in of):.0%} / {mean(x[2] for x in of):.0%}" for of in by_k]
        above = max(0.0, *(c["above"] for c in each))
        n, wrong = (sum(c["sure"][i] for c in each) for i in (0, 1))
        sure = f"{n}, {wrong / n:.0%} wrong" if n else "0"
        lines.append("| " + " | ".join([task, kind, *pairs, f"{above:.1%}", sure]) + " |")
    return "\n".join(lines)


def suspects_pruned() -> str:
    """Accuracy after removing, minus that after removing as many at random."""
    lines = ["| data | wrong labels | seeds | removed | `--by auto` | `clean` | `noisy` | "
             "lowest values |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (task, kind), every in _suspect_cells().items():
        cells = [c["prune"] for c in every if "prune" in c]
        for ratio in cells[0] if cells else ():
            gains = []
            for rule in ("auto", "clean", "noisy", "lowest values"):
                x = [c[ratio][rule] - c[ratio]["random"] for c in cells]
                gains.append(f"{mean(x):+.3f} ± {_error(x):.3f}")
            about = [task, kind, str(len(cells)), f"{float(ratio):.0%}"]
            lines.append("| " + " | ".join([*about, *gains]) + " |")
    return "\n".join(lines)


def duplicates() -> str:
    """Are twins known to a run, and what does removing them do?"""
    data = results("duplicates-cpu")
    lines = ["| | mean over seeds |", "|---|---:|"]
    for name in data["runs"][0]["nearest"]:
        share = mean(r["nearest"][name] for r in data["runs"])
        lines.append(f"| twin is the nearest by {name} | {share:.0%} |")
    for name in ("auto", "auto, groups"):
        gain = [r["removed"][name] - r["removed"]["random"] for r in data["runs"]]
        lines.append(f"| accuracy, `{name}` minus random | {mean(gain):+.4f}{_spread(gain)} |")
    return "\n".join([*lines, "", measured_with(data)])


def gradient_norm() -> str:
    """What the norm of each example's whole gradient would cost."""
    data = results("gradient_norm-cpu")
    lines = ["| | watched step | the norms in it | share |", "|---|---:|---:|---:|"]
    for name, found in data["cases"].items():
        step, norms = found["step ms"], found["norms ms"]
        lines.append(f"| {name} | {step:.1f} | {norms:.2f} | {found['share']:.1%} |")
    return "\n".join([*lines, "", measured_with(data)])


def steadiness() -> str:
    """What a sample of the steps says of a ranking's noise, beside the truth."""
    data = results("steadiness")
    every = [k for k in data["agreement"][0] if k.startswith("every")]
    shares = [f"1 of {k.split()[1]}" for k in every]
    lines = ["| validation, seed | one step: true | " + " | ".join(shares) + " | sums: true | "
             + " | ".join(shares) + " |", "|---|" + "---:|" * (2 + 2 * len(every))]  # fmt: skip
    off = []
    for row in data["agreement"]:
        steps = [f"{row[k]['agree']:.2f}" for k in every]
        sums = []
        for x in (row[k] for k in every):
            known = x["of_sums"] is not None and x["error"] is not None
            sums.append(f"{x['of_sums']:.2f} ± {x['error']:.2f}" if known else "–")
            off += [abs(x["of_sums"] - row["sums"]) / x["error"]] if known else []
        cells = [f"{row['way']}, {row['seed']}", f"{row['step']:.2f}", *steps, f"{row['sums']:.2f}"]
        lines.append(f"| {' | '.join([*cells, *sums])} |")
    near = sum(x <= 2 for x in off)
    said = (
        f"Of the sums, {near} of {len(off)} estimates are within two standard errors of the truth."
    )
    return "\n".join([*lines, "", f"{said} {measured_with(data)}"])


def steadiness_cost() -> str:
    data = results("steadiness")
    lines = ["| | step, ms | measured, ms | of the run |", "|---|---:|---:|---:|"]
    for row in data["costs"]:
        cells = f"{row['ms']:.1f} | {row['ms_measured']:.1f} | {row['share_of_run']:.1%}"
        lines.append(f"| {row['model']} | {cells} |")
    return "\n".join([*lines, "", measured_with(data)])


def signals() -> str:
    data = results("signals-cpu")
    lines = ["| | step | with signals | share | alone |", "|---|---:|---:|---:|---:|"]
    for name, x in data["cases"].items():
        share = f"{x['share']:.1%} ± {x['error']:.1%}"
        cells = f"{x['without']:.2f} | {x['with']:.2f} | {share} | {x['alone']:.2f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join([*lines, "", measured_with(data)])


def _error(x: Sequence[float]) -> float:
    """The standard error of a mean."""
    return stdev(x) / len(x) ** 0.5 if len(x) > 1 else float("nan")


def first_steps() -> str:
    """Values of the first steps beside exact Shapley values: the worst run of each batch size."""
    data = results("first_steps")
    steps = list(data["runs"][0]["steps"])
    lines = ["| batch | estimator |" + "".join(f" step {s} |" for s in steps)]
    lines.append("|---|---|" + "---|" * len(steps))
    for B in sorted({r["batch"] for r in data["runs"]}):
        runs = [r["steps"] for r in data["runs"] if r["batch"] == B]
        for name in ("secant", "shapley"):
            cells = []
            for s in steps:
                R = min(r[s][name]["R"] for r in runs)
                error = max(r[s][name]["error"] for r in runs)
                cells.append(f"{R:.3f}, {percent(error) if error < 10 else f'{error:.0f}×'}")
            lines.append(f"| {B} | `{name}` | {' | '.join(cells)} |")
    models, sampled = sorted({r["model"] for r in data["runs"]}), len(data["runs"])
    of = f"{', '.join(models)}; AdamW, lr {data['lr']:g}, float64, all coalitions"
    lines += ["", f"Lowest correlation and largest relative error of {sampled} runs ({of})."]
    lines.append(f"{measured_with(data, [data['date']])}")
    return "\n".join([*lines, *wide_steps()])


def wide_steps() -> list[str]:
    """The same of a model whose orders are sampled of a part of the coordinates."""
    data = results("first_steps_wide")
    lines = ["", "0.8 million parameters, orders of a part of the coordinates:", ""]
    steps = list(data["runs"][0]["steps"])
    lines.append("| batch | learning rate | estimator |" + "".join(f" step {s} |" for s in steps))
    lines.append("|---|---|---|" + "---|" * len(steps))
    for r in data["runs"]:
        for name in ("shapley",) if r.get("whole") else ("secant", "shapley"):
            found = [r["steps"].get(s, {}).get(name) for s in steps]
            cells = ["" if x is None else f"{x['R']:.4f}, {x['error']:.1%}" for x in found]
            name = f"`{name}`" + ", all coordinates" * r.get("whole", False)
            lines.append(f"| {r['batch']} | {r['lr']:g} | {name} | {' | '.join(cells)} |")
    return [*lines, "", measured_with(data)]


def first_steps_cost() -> str:
    """Seconds of single steps, and what all measured steps of the phase take beside the secant."""
    data = results("first_steps_cost")
    names = {"mlp": "MLP", "gpt": "GPT", "encoder": "encoder"}
    steps = (0, 1, 2, 5, 10)
    lines = [
        "| model | parameters | batch | |" + "".join(f" step {s} |" for s in steps) + " samples |"
    ]
    lines.append("|---|---:|---:|---|" + "---:|" * (len(steps) + 1))
    for name, label in names.items():
        own = {k: data.get(k, {}).get(name, {}) for k in ("after", "before")}
        rows = {"plain": own["after"].get("plain"), "`secant`": own["after"].get("secant")}
        rows["`shapley`"] = own["after"].get("shapley")
        rows["`shapley`, before"] = own["before"].get("shapley")
        for kind, found in rows.items():
            if found is None:  # not measured
                continue
            times = [f"{t[s]:.2g}" if s < len(t := found["seconds"]) else "" for s in steps]
            some = ", ".join(map(str, found["samples"][:6]))
            cells = [label, f"{found['parameters']:,}", str(found["batch"]), kind, *times, some]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Samples: of the first six steps; of the MLP pairs of orders of all coordinates.",
    ]
    return "\n".join([*lines, measured_with(data)])


def mean_slope() -> str:
    """Relative errors of the mean slope over random coalitions; the largest of all runs."""
    data = results("mean_slope")
    runs = [r for r in data["runs"] if r["batch"] <= 10]
    steps = list(runs[0]["steps"])
    lines = ["| |" + "".join(f" step {s} |" for s in steps), "|---|" + "---:|" * len(steps)]
    for name in runs[0]["steps"][steps[0]]:
        worst = [max(r["steps"][s][name] for r in runs) for s in steps]
        cells = [f"{x:.1%}" if x < 10 else f"{x:.0f}×" for x in worst]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    of = ", ".join(sorted({r["model"] for r in runs}))
    lines += ["", f"Largest relative error of {len(runs)} runs ({of}; batches 4 and 8; AdamW, lr "
              f"{data['lr']:g}, float64, all coalitions)."]  # fmt: skip
    return "\n".join([*lines, measured_with(data)])


def scaling(device: str, base: str, *names: str) -> str:
    """Plain and fast training where one thing differs from the base."""
    runs = costs(device, base, *names)
    if len(runs) < 2 or runs[0][0] != base:
        return missing(device)
    options = runs[0][1]["options"]
    memory = any(row["peak_bytes"] for _, run in runs for row in run["rows"])
    tail = " memory of plain |" if memory else ""
    lines = [f"| | plain, ms | `fast`, ms | throughput of plain |{tail}"]
    lines.append("|---|---:|---:|---:|" + "---:|" * memory)
    for name, run in runs:
        rows = {r["variant"]: r for r in run["rows"] if r["mode"] == options["mode"]}
        plain, fast = rows.get("plain"), rows.get("fast")
        if not plain or not fast or plain["step_ms"] is None:
            continue
        what = "as above" if name == base else _difference(run["options"], options)
        failed = fast["step_ms"] is None
        ms = fast["status"] if failed else f"{fast['step_ms']['median']:.1f}"
        cells = [what, f"{plain['step_ms']['median']:.1f}", ms, percent(fast["ratio"])]
        cells += [percent(fast["memory_ratio"])] if memory else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *below(device, runs)])


def _difference(options: dict[str, Any], base: dict[str, Any]) -> str:
    if options["model"] != base["model"]:
        return f"{options['model']}"
    words = {
        "batch": "batch of {}", "length": "{} tokens", "targets": "{} targets",
        "validation": "{} validation sequences",
    }  # fmt: skip
    return ", ".join(w.format(options[k]) for k, w in words.items() if options[k] != base[k])


def floor(options: dict[str, Any], parameters: int) -> dict[str, tuple[float, float]]:
    """Bytes and operations of each stage for a step of GPT-2 small, training="fast", bf16.

    P parameters, B examples of T tokens. A token costs 6 operations per parameter (2 forward, 4
    backward) and 12·L·D·T/2 in causal attention. Weights and optimizer state are float32,
    per-example gradients bfloat16. Each number is read or written once per stage.
    """
    P, B, T, L, D = parameters, options["batch"], options["length"], 12, 768
    per_token = 6 * P + 6 * L * D * T
    rows = 2 * B * P
    return {
        "training itself": (28 * P, B * T * per_token),  # AdamW: 4 reads and 3 writes
        "per-example gradients": (rows, 0),  # the products are the training's own
        "their sum": (rows + 4 * P, 0),
        "update map": (24 * P, 0),  # w, g, m, v in; w at the midpoint and K out
        # weights cast and read in both passes, the gradient written
        "validation": (14 * P, options["validation"] * T * per_token),
        "contraction": (rows + 12 * P, 2 * B * P),  # K, ∇ℓ and G beside the rows
    }


def stages() -> str:
    """GPT-2 small on the GPU: stages of a step beside what the hardware allows at best."""
    runs = [run for _, run in costs("h200", "gpt2", "gpt2-compile")]
    base = {"batch": 16, "length": 1024, "validation": 1}
    parameters = runs[0]["parameters"] if runs else 124_439_808
    names = {
        "training itself": "plain training step", "per-example gradients": "per-example gradients",
        "their sum": "sum over examples", "update map": "shift to the midpoint, secant",
        "validation": "validation pass", "contraction": "contraction",
    }  # fmt: skip
    modes = [run["options"]["mode"] for run in runs]
    titles = "".join(f" measured, {'`torch.compile`' if m == 'compile' else m} |" for m in modes)
    lines = [
        f"| stage | GB | TFLOP | floor, ms |{titles}",
        "|---|---:|---:|---:|" + "---:|" * len(runs),
    ]
    found = [_stages(run) for run in runs]
    total = 0.0
    for key, (moved, operations) in floor(base, parameters).items():
        least = 1e3 * max(moved / BANDWIDTH, operations / RATE)
        if key == "training itself":  # the optimizer's bytes come after the operations
            least = 1e3 * (moved / BANDWIDTH + operations / RATE)
        total += least
        cells = [names[key], f"{moved / 1e9:.1f}", f"{operations / 1e12:.2f}", f"{least:.2f}"]
        cells += [f[key] for f in found]
        lines.append("| " + " | ".join(cells) + " |")
    whole = [f"{_of(run, 'fast')['step_ms']['median']:.1f}" for run in runs]
    lines.append("| " + " | ".join(["watched step", "", "", f"{total:.2f}", *whole]) + " |")
    if not runs:
        return "\n".join([*lines, "", missing("h200")])
    return "\n".join([*lines, *below("h200", costs("h200", "gpt2", "gpt2-compile"))])


def _of(run: dict[str, Any], variant: str) -> dict[str, Any]:
    return next(r for r in run["rows"] if r["variant"] == variant)


def _stages(run: dict[str, Any]) -> dict[str, str]:
    """Stages that are inside the backward pass are what the step takes beyond the others."""
    plain, fast = _of(run, "plain"), _of(run, "fast")
    named = {k: fast["stages_ms"].get(k, 0.0) for k in ("update map", "validation", "contraction")}
    begun = plain["step_ms"]["median"]
    rest = fast["step_ms"]["median"] - begun - sum(named.values())
    cells = {k: f"{ms:.2f}" for k, ms in named.items()}
    return cells | {
        "training itself": f"{begun:.2f}", "per-example gradients": f"{rest:.2f} (with the sum)",
        "their sum": "",
    }  # fmt: skip


def precision() -> str:
    """What is measured is also right: against the same step in float64, over several seeds."""
    lines = [
        "| model, batch | variant | Pearson R: lowest, median | relative error: median, highest |",
        "|---|---|---:|---:|",
    ]
    notes = []
    for path in sorted(RESULTS.glob("precision-*.json")):
        data = json.loads(path.read_text())
        for variant in ("fast", "tangent", "direct-loop"):
            R, error = (
                sorted(x[variant][k] for x in data["seeds"]) for k in ("R", "relative_error")
            )
            lines.append(
                f"| {data['model']}, {data['batch']} × {data['length']} | `{variant}` "
                f"| {R[0]:.5f}, {median(R):.5f} | {median(error):.1%}, {error[-1]:.1%} |"
            )
        notes.append(f"{data['model']}: {len(data['seeds'])} seeds; {measured_with(data)}")
    return "\n".join([*lines, "", *notes]) if notes else missing("h200", "precision")


def choices() -> str:
    """How well the cost model chooses, by device, type and training."""
    lines = [
        "| device | type | training | shapes | within 10 % of the better | all shapes: model |"
        " always ghost | always materialise |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    notes = []
    for device in ("cpu", "h200"):
        path = RESULTS / f"cost_model-{device}.json"
        if not path.exists():
            notes.append(missing(device, "cost_model"))
            continue
        data = json.loads(path.read_text())
        if data.get("clock") == "device events":  # the host's launches were in the time
            notes.append(missing(device, "cost_model"))
            continue
        for key, x in data["summary"].items():
            dtype, training = key.split(", ")
            kinds = ("total", "ghost", "materialise")
            over = [f"{x[f'{kind}_over_best']:.2f}" for kind in kinds]
            cells = [device.upper(), dtype, training, str(x["points"])]
            cells += [percent(x["within_10_percent"]), *over]
            lines.append("| " + " | ".join(cells) + " |")
        notes.append(measured_with(data))
    return "\n".join([*(lines if len(lines) > 2 else []), "", *notes]).strip("\n")


SCALING = {
    "h200": ("batch-4", "batch-64", "length-256", "width-512", "width-1280", "validation-4",
             "targets-4", "targets-16"),
    "cpu": ("batch-4", "batch-64", "length-32", "length-512", "width-64", "width-256", "targets-4",
            "targets-16"),
}  # fmt: skip
# docs/costs.md and docs/distributed.md, from benchmarks/distributed.py


def distributed() -> str:
    """Counted bytes and throughput of several processes."""
    data = results("distributed-cpu")
    lines = [
        "| ranks | | its own bytes per step | inrun's, counted | modelled | share of plain "
        "throughput |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for run in data["runs"]:
        for rows, first in (("rows", "ddp_bytes"), ("sharded", "fsdp_bytes")):
            plain = run[rows][0]
            for row in run[rows]:
                keys = (first, "inrun_bytes", "modelled_bytes")
                shares = f"{plain['step_ms'] / row['step_ms']:.0%}"
                cells = [*(f"{row[k]:,.0f}" for k in keys), shares]
                name = ("DDP, " if rows == "rows" else "FSDP2, ") + row["variant"]
                lines.append(f"| {run['ranks']} | {name} | " + " | ".join(cells) + " |")
    where = data["environment"]
    load = where.get("load")  # older results do not say; they are from a busy machine
    quiet = load is not None and load < where["cores"] / 4
    busy = "" if quiet else " that were busy with other work"
    below = (
        f"A GPT of {plain['parameters']:,} parameters, {data['options']['batch']} × "
        f"{data['options']['length']} tokens per rank, float32, {where['cpu']} with "
        f"{where['cores']} cores{busy}, torch {where['torch']}."
    )
    return "\n".join([*lines, "", below])


def sharded_memory() -> str:
    """What a rank holds beside the plain training under fully_shard."""
    data = results("sharded_memory-cpu")
    lines = [
        "| ranks | P/W, MiB | tensors, plain | watched | in audited steps | more, in P/W | "
        "audited | resident, plain | watched |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in data["runs"]:
        unit, plain, watched = 4 * run["parameters"] / run["ranks"], run["plain"], run["watched"]
        sizes = [unit, plain["tensors"], watched["tensors"], watched["audited"]]
        more = [(watched[k] - plain[k]) / unit for k in ("tensors", "audited")]
        cells = [str(run["ranks"]), *(f"{x / 2**20:,.0f}" for x in sizes)]
        cells += [f"{x:.1f}" for x in more]
        cells += [f"{x['resident'] / 2**20:,.0f}" for x in (plain, watched)]
        lines.append("| " + " | ".join(cells) + " |")
    options, where = data["options"], data["environment"]
    below = (
        f"A GPT of {data['runs'][0]['parameters']:,} parameters, {options['batch']} × "
        f"{options['length']} tokens per rank, float32, AdamW, MiB of the rank that has most, "
        f"torch {where['torch']} on a CPU (`benchmarks/sharded_memory.py`)."
    )
    return "\n".join([*lines, "", below])


def communication() -> str:
    """Modelled bytes and time of communication for GPT-2 small and a model of 7 billion."""
    lines = [
        "| GPUs | parameters | DDP, GB sent per GPU | inrun, every rank validates | inrun, split | "
        "split, ms at 450 GB/s | at 50 GB/s |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for parameters in (124_439_808, 7_000_000_000):
        for ranks in (8, 64, 512):
            whole, split = (ring(modelled(parameters, split=s), ranks) for s in (False, True))
            ms = [f"{1e3 * split / speed:.1f}" for speed in (450e9, 50e9)]
            lines.append(
                f"| {ranks} | {parameters / 1e9:.3g} B | {ring(4 * parameters, ranks) / 1e9:.2f} | "
                f"{whole:.0f} bytes | {split / 1e9:.2f} GB | {ms[0]} | {ms[1]} |"
            )
    return "\n".join(lines)


def sharded_communication() -> str:
    """The same with fully_shard: all numbers in float32, one validation pass per step."""
    lines = [
        "| GPUs | parameters | FSDP, GB sent per GPU | inrun, GB | of these the contraction | "
        "contraction, ms at 450 GB/s | at 50 GB/s |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for parameters in (124_439_808, 7_000_000_000):
        for ranks in (8, 64, 512):
            own = scatter(sharded_pass(parameters, 0), ranks)
            added = scatter(modelled_sharded(parameters, 0, 1), ranks)
            part = added - own
            ms = [f"{1e3 * part / speed:.1f}" for speed in (450e9, 50e9)]
            lines.append(
                f"| {ranks} | {parameters / 1e9:.3g} B | {own / 1e9:.2f} | {added / 1e9:.2f} | "
                f"{part / 1e9:.2f} | {ms[0]} | {ms[1]} |"
            )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "numbers": numbers,
    "gpu": gpu,
    "demo": demo,
    "reproduce": overview.table,
    "headlines": overview.headlines,
    "costs-gpu": lambda: headline(
        "h200", "gpt2-compile", "gpt2", "hf-gpt2-compile", "hf-gpt2", "convnet"
    ),
    "costs-cpu": lambda: headline("cpu", "gpt-4x128", "convnet"),
    "scaling-gpu": lambda: scaling("h200", "gpt2", *SCALING["h200"]),
    "scaling-cpu": lambda: scaling("cpu", "gpt-4x128", *SCALING["cpu"]),
    "targets-compiled": lambda: scaling("h200", "gpt2-compile", "targets-16-compile"),
    "finetune": finetune,
    "host": host,
    "first-steps": first_steps,
    "first-steps-cost": first_steps_cost,
    "mean-slope": mean_slope,
    "duplicates": duplicates,
    "suspects": suspects,
    "suspects-confidence": suspects_confidence,
    "suspects-pruned": suspects_pruned,
    "signals": signals,
    "steadiness": steadiness,
    "steadiness-cost": steadiness_cost,
    "gradient-norm": gradient_norm,
    "stages": stages,
    "precision": precision,
    "choices": choices,
    "distributed": distributed,
    "sharded-memory": sharded_memory,
    "communication": communication,
    "sharded-communication": sharded_communication,
    **lds.TABLES,
    **{f"short-{name}": partial(overview.short, name) for name in experiments.EXPERIMENTS},
} | reproduced()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + "\n" + m[3], text)


def main() -> None:
    for page in pages():
        text = page.read_text()
        if (new := rendered(text)) != text:
            page.write_text(new)
            print("updated", page.relative_to(ROOT))


if __name__ == "__main__":
    main()
