"""Write the model card of a drafter: what it is, how to load it, what was measured. Missing figures are left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_specgen.checkpoints.config import DrafterConfig, FeatureConfig
from hf_specgen.checkpoints.formats.base import ReadOptions
from hf_specgen.checkpoints.methods import method_named
from hf_specgen.checkpoints.opening import Report, open_checkpoint
from hf_specgen.errors import SpecGenError

CARD = "README.md"
TEMPLATE = "template.md.jinja"
TRAINING_PART = "training.md.jinja"
BENCH_SCHEMA = "hf_specgen.bench/1"
TRAINING = "training.json"
CURVE = "training.png"
TRAINING_SCHEMA = "hf_specgen.training/1"
LOSSY_RULES = ("typical", "threshold")
OTHER_DRAFTERS = ("prompt-lookup", "small-model", "none")
POSITIONS = 8  # of a draft that are shown
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CardOptions:
    """Hold what a card says beyond the checkpoint itself.

    ``base_model``: the target's repository, by default the one the drafter was made for. ``bench``: reports of
    ``hf-specgen bench``, as they were read from JSON. ``training``: what ``trainers/report.py`` wrote; by default the
    file beside the drafter.
    """

    name: str = ""
    base_model: str = ""
    license: str = ""
    datasets: tuple[str, ...] = ()
    bench: tuple[Mapping[str, Any], ...] = ()
    training: Mapping[str, Any] | None = None


def write_card(folder: str | Path, options: CardOptions | None = None, overwrite: bool = False) -> Path:
    """Write README.md beside a drafter's files, from its config and from bench reports.

    Raises: ``SpecGenError`` when there is one and ``overwrite`` is not given, or for a report of another drafter;
    ``IncompatibleDrafter`` when the folder holds no drafter.
    """
    path = Path(folder) / CARD
    if path.exists() and not overwrite:
        raise SpecGenError(f"{path} exists and stays as it is: remove it, or ask for it to be overwritten.")
    options = options or CardOptions()
    if options.training is None:
        options = replace(options, training=read_training(folder))
    data = str((options.training or {}).get("data") or "")
    if not options.datasets and is_repository(data):
        options = replace(options, datasets=(data,))
    text = render_card(open_checkpoint(folder, ReadOptions()).report, options)
    path.write_text(text, encoding="utf-8")
    return path


def render_card(report: Report, options: CardOptions) -> str:
    """Return a card's text. Raises: ``SpecGenError`` for a bench report that is none, or of another drafter."""
    config = report.config
    target = options.base_model or hub_name(config)
    name = options.name or Path(report.source).resolve().name
    return (
        _templates()
        .get_template(TEMPLATE)
        .render(
            front_matter=front_matter(config, target, options),
            title=name.rpartition("/")[2] or name,
            summary=_summary(config, target),
            facts=_facts(report, target),
            python=_python(config, name, target),
            tools=method_named(config.method).servers(report, name, target or "<the target>"),
            training=_training(options.training),
            measured=[_measured(found) for found in options.bench],
            limits=_limits(report),
            license=_license(options, target),
        )
    )


def training_part(folder: str | Path) -> str:
    """Return what a card says of the training whose figures lie in a folder, nothing where there are none."""
    found = _training(read_training(folder))
    return "" if found is None else _templates().get_template(TRAINING_PART).render(training=found)


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(card_folder()), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


def read_training(folder: str | Path) -> Mapping[str, Any] | None:
    """Return what a training left beside a drafter, None where there is nothing of it."""
    path = Path(folder) / TRAINING
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, Mapping) and found.get("schema") == TRAINING_SCHEMA else None


def card_folder() -> Path:
    """Return where the templates are: inside the package when installed, beside it in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "model_cards"
    return inside if inside.is_dir() else package.parent / "model_cards"


def hub_name(config: DrafterConfig) -> str:
    """Return the target's repository, or nothing where the name is a path of somebody's machine."""
    name = str(config.target.get("name") or "")
    return name if is_repository(name) else ""


def is_repository(name: str) -> bool:
    """Tell whether a name may be published: owner/name on the Hub, and no folder here."""
    return bool(_REPOSITORY.fullmatch(name)) and not name.startswith(".") and not Path(name).exists()


def front_matter(config: DrafterConfig, target: str, options: CardOptions) -> str:
    """Return the YAML that the Hub reads; keys without a value are left out."""
    relation: dict[str, Any] = {"base_model_relation": "adapter"} if target else {}
    tags = ["speculative-decoding", "speculative-decoding-draft", "draft-model", config.method, "hf_specgen"]
    data = ModelCardData(
        library_name="hf_specgen",
        base_model=target or None,
        pipeline_tag="text-generation",
        tags=tags,
        datasets=list(options.datasets) or None,
        license=options.license or None,
        **relation,
    )
    return str(data.to_yaml()).strip()


def _summary(config: DrafterConfig, target: str) -> str:
    return (
        f"A drafter for speculative decoding ({method_named(config.method).title}). It proposes tokens that "
        f"{f'[{target}](https://huggingface.co/{target})' if target else 'its target'} checks several at a time; what "
        "is written keeps the target's own distribution. It writes no text by itself."
    )


def _facts(report: Report, target: str) -> list[tuple[str, str]]:
    config = report.config
    sizes = f"hidden size {config.target_hidden_size}, vocabulary {config.vocab_size}"
    rows = [
        ("target", f"`{target}`" if target else ""),
        ("target's revision", _code(config.target.get("revision"))),
        ("target's fingerprint", _code(config.target.get("fingerprint"))),
        ("target's sizes", sizes),
        ("method", method_named(config.method).title),
        ("parameters", f"{report.parameters:,}"),
        ("reads", "; ".join(report.needs[1:])),
    ]
    rows += config.facts.items()
    if config.reduces_vocabulary:
        rows.append(("draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} ids"))
    if config.num_tokens:
        rows.append(("tokens per draft", str(config.num_tokens)))
    if config.tree and not isinstance(config.tree, list):
        rows.append(("tree", f"`{config.tree}`"))
    if isinstance(config.tree, list):
        rows.append(("tree", f"static, {len(config.tree)} paths"))
    return [(label, value) for label, value in rows if value]


def _code(value: Any) -> str:
    return f"`{value}`" if value else ""


def _python(config: DrafterConfig, name: str, target: str) -> list[str]:
    model = target or "<the target>"
    return [
        "import hf_specgen",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{model}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{model}")',
        f'drafter = hf_specgen.load_drafter("{name}", target=model)',
        "",
        "hf_specgen.enable(model)",
        'chat = [{"role": "user", "content": "..."}]  # the format that the drafter saw in training accepts most',
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        "out = model.generate(**inputs, assistant_model=drafter, max_new_tokens=256)",
        "print(tokenizer.decode(out[0]), out.speculation.mean_acceptance_length)",
    ]


def _measured(report: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a bench report into the tables of a card."""
    if report.get("schema") != BENCH_SCHEMA or "ours" not in report.get("methods", {}):
        raise SpecGenError(
            f"a report of schema {report.get('schema')!r} is no result of this program: the report.json that "
            f"`hf-specgen bench --out FOLDER` writes ({BENCH_SCHEMA}) is required."
        )
    drafter = report.get("drafter", {})
    if re.split("[:+]", str(drafter.get("name", "")))[0] in OTHER_DRAFTERS:
        raise SpecGenError(
            f"the report measured {drafter['name']}, not this drafter: its figures do not belong on this card."
        )
    ours = report["methods"]["ours"]
    plain = report["methods"].get("plain", {})
    rates = ((ours.get("acceptance") or {}).get("acceptance_rates") or [])[:POSITIONS]
    rule = str(drafter.get("rule", ""))
    columns, rows = _speed_rows(ours, plain)
    return {
        "heading": _heading(report),
        "conditions": _conditions(report),
        "lossy": rule if rule in LOSSY_RULES else "",
        "columns": columns,
        "rules": ["---", *["---:"] * (len(columns) - 1)],
        "rows": rows,
        "positions": list(range(1, len(rates) + 1)),
        "rates": [f"{rate:.2f}" for rate in rates],
        "identity": _identity(ours),
    }


def _training(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what the template shows of a training."""
    if found is None:
        return None
    machine = found["machine"]
    values = found["evaluation"]
    place = ", ".join(str(part) for part in (machine["device"], _told("", machine.get("cores"), " cores")) if part)
    known = [name for name in ("hf_specgen", "transformers", "torch") if machine.get(name)]
    seconds = _number(found.get("seconds"), ".0f")
    data = _code(found.get("data"))
    best = f"; the weights are those of step {found['best_step']:,}, the best" if found.get("best_step") else ""
    begun = f", from step {found['from_step']} on" if found.get("from_step") else ""
    facts = [
        ("target as it was read", ", ".join(part for part in (_code(found.get("target")), found.get("dtype")) if part)),
        ("data", ": ".join(part for part in (data, found.get("authors")) if part)),
        ("chat template", _settings(found.get("chat_template_kwargs"))),
        ("texts", _number(found.get("texts"), ",d")),
        ("supervised tokens", _number(found.get("tokens"), ",d")),
        ("started from", str(found.get("start") or "")),
        ("optimizer steps", f"{found['steps']:,} ({found['epochs']:.2f} epochs){best}"),
        ("computed in", str(found["precision"])),
        ("processes", str(found["processes"])),
        ("arguments", _code(" ".join(f"--{name} {value}" for name, value in found["arguments"].items()))),
        ("time", f"{seconds} s on {place}, evaluations included{begun}" if seconds else ""),
        ("versions", ", ".join(f"{name} {machine[name]}" for name in known)),
    ]
    depths = [depth for depth in range(1, POSITIONS + 1) if f"top1_{depth}" in values]
    shares = {
        "best token is the target's": "top1",
        "a drawn token would be accepted: sum of min(p, q)": "alpha",
        "all tokens up to here are right": "prefix",
    }
    rows = [[label, *(_number(values.get(f"{name}_{at}"), ".3f") for at in depths)] for label, name in shares.items()]
    return {
        "facts": [(label, value) for label, value in facts if value],
        "depths": depths,
        "held_out": f"{found['held_out']} " if found.get("held_out") else "",
        "rows": rows if depths else [],
        "length": _number(values.get("acceptance_length"), ".2f"),
        "decoding": _decoding(found.get("decoding"), place),
        "curve": CURVE if found["curve"] else "",
    }


def _decoding(found: Mapping[str, Any] | None, place: str) -> list[str]:
    if found is None:
        return []
    before = found["before"]
    was = "" if before is None else f", {before:.2f} before training"
    speeds = {
        "this drafter": (found["speedup"], found.get("used_tokens_per_round")),
        "this drafter with prompt lookup, `WithLookup(drafter)`": (
            found.get("combined_speedup"),
            found.get("combined_tokens_per_round"),
        ),
        "prompt lookup alone, which needs no training": (
            found["lookup_speedup"],
            found["lookup_tokens_per_round"],
        ),
    }
    rows = [
        f"| {name} | {speed:.2f}x | {_number(tokens, '.2f')} |"
        for name, (speed, tokens) in speeds.items()
        if speed is not None
    ]
    return [
        f"Decoding {found['prompts']} held-out prompts, {found['max_new_tokens']} new tokens each, greedy, batch 1, "
        f"{found['dtype']}, on {place}, in one run:",
        "",
        "| | speed-up over plain `generate()` | tokens a round |",
        "| --- | ---: | ---: |",
        *rows,
        "",
        f"With always {found['num_tokens']} tokens drafted: {found['tokens_per_round']:.2f} tokens a round{was}. Such "
        f"a round costs {found['round_cost']:.2f} plain steps, so {found['round_cost']:.2f} tokens a round break even.",
        f"{found['same']} of {found['prompts']} texts were token by token those of plain decoding"
        + ("." if found["dtype"] == "float32" else f"; {found['dtype']} rounding may part the others."),
    ]


def _heading(report: Mapping[str, Any]) -> str:
    machine = report.get("machine", {})
    target = report.get("target", {})
    device = machine.get("gpu") if target.get("device") != "cpu" and machine.get("gpu") else machine.get("cpu")
    return ", ".join(str(part) for part in (device, target.get("dtype")) if part) or "One run"


def _conditions(report: Mapping[str, Any]) -> str:
    machine = report.get("machine", {})
    settings = report.get("settings", {})
    decoding = settings.get("decoding", {})
    target = report.get("target", {})
    name = target.get("name")
    heat = "greedy" if settings.get("greedy") else f"temperature {decoding.get('temperature')}"
    parts = [
        _told("target", Path(name).name if name and not is_repository(name) else name),
        _told("batch", " and ".join(report.get("batch_sizes", ())) or settings.get("batch_size")),
        heat if "greedy" in settings else "",
        _told("", decoding.get("max_new_tokens"), " new tokens"),
        _told("", len(report.get("prompts", ())) or None, " prompts"),
        {True: "chat template", False: "no chat template"}.get(settings.get("chat"), ""),
        _settings(settings.get("chat_template_kwargs")),
        _told("", machine.get("cores"), " cores") if target.get("device") == "cpu" else "",
        _told("", machine.get("threads"), " threads") if target.get("device") == "cpu" else "",
        *(_told(name, machine.get(name)) for name in ("torch", "transformers", "hf_specgen")),
    ]
    return ", ".join(part for part in parts if part) + "."


def _settings(given: Mapping[str, Any] | None) -> str:
    """Say what the chat template was told beside the chat."""
    return f"chat_template_kwargs {_code(json.dumps(given))}" if given else ""


def _told(label: str, value: Any, unit: str = "") -> str:
    return "" if value is None else f"{label} {value}{unit}".strip()


def _speed_rows(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns that have figures, and a row per category with the total last."""
    baseline = plain.get("categories", {})
    kinds = ours.get("categories", {})
    parts = [(name, part, baseline.get(name, {})) for name, part in kinds.items()] if len(kinds) > 1 else []
    parts.append(("all", ours, plain))
    cells = {
        "plain tokens/s": [_number(base.get("tokens_per_second"), ".1f") for _, _, base in parts],
        "tokens/s": [_number(part.get("tokens_per_second"), ".1f") for _, part, _ in parts],
        "speed-up (95 % interval)": [_speedup(part) for _, part, _ in parts],
        "acceptance length": [_accepted(part, "mean_acceptance_length") for _, part, _ in parts],
        "tokens per round": [_accepted(part, "tokens_per_round") for _, part, _ in parts],
        "prompts": [_number(part.get("prompts"), "d") for _, part, _ in parts],
    }
    kept = {name: column for name, column in cells.items() if any(column)}
    rows = [[parts[place][0], *(column[place] for column in kept.values())] for place in range(len(parts))]
    return ["prompts of kind", *kept], rows


def _number(value: Any, form: str) -> str:
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else format(value, form)


def _speedup(part: Mapping[str, Any]) -> str:
    value = part.get("speedup")
    interval = part.get("speedup_ci95")
    text = "" if value is None else f"{value:.2f}x"
    return f"{text} ({interval[0]:.2f}-{interval[1]:.2f})" if text and interval else text


def _accepted(part: Mapping[str, Any], name: str) -> str:
    return _number((part.get("acceptance") or {}).get(name), ".2f")


def _identity(ours: Mapping[str, Any]) -> str:
    same = ours.get("identical")
    parts = ours.get("divergences") or []
    gaps = [part.get("shortfall") for part in parts]
    known = bool(gaps) and None not in gaps
    where = f"; the others part at a logit gap of at most {max(gaps):.3f}" if known else ""
    return f"Texts identical to plain greedy: {same['same']} of {same['compared']}{where}." if same else ""


def _limits(report: Report) -> list[str]:
    config = report.config
    lines = [
        "It fits this target alone: other sizes are refused, another fingerprint is warned about: the text stays "
        "exact, fewer drafts are accepted.",
        "Acceptance depends on prompts, language, chat template, temperature and context length; it falls where these "
        "differ from training.",
    ]
    if isinstance(config, FeatureConfig):
        lines.append(f"It was made for texts of up to {config.max_position_embeddings} tokens.")
    if config.reduces_vocabulary:
        lines.append(
            f"It can draft {config.draft_vocab_size} of {config.vocab_size} token ids; the others end a draft."
        )
    lines.append('Lossy rules such as `rule="typical"` are opt-in and do not keep the target\'s distribution.')
    return [*lines, *report.warnings]


def _license(options: CardOptions, target: str) -> str:
    own = f"`{options.license}`." if options.license else "None is stated."
    return f"{own} The license of {f'`{target}`' if target else 'the target'} and of what it writes applies beside it."
