"""Generate text with onnxruntime-genai, and colour each token by how far it is to be trusted.

    pip install onnxruntime-genai
    python generate.py "The capital of France is"
    python generate.py --chat --html answer.html "Who was Ada Lovelace?"

The folder of this program is a model with uncertainty. What it says of a token is known before the token is drawn: how
strange the place in the text is to the model (p-value: the share of ordinary places that are as strange or stranger),
and how open the next token is (entropy).
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import onnxruntime_genai as og
except ImportError:
    sys.exit("this needs onnxruntime-genai: pip install onnxruntime-genai")

HERE = Path(__file__).resolve().parent
NAMES = "uncertainty.json"
MOST_ALTERNATIVES = 5

#: Steps of colour: p-values from which down a place is uncommon and rare; below the line of the file it is flagged.
UNCOMMON, RARE = 0.3, 0.1
#: The same of entropy, in tokens that a choice is as open as.
OPEN, WIDE, ENDLESS = 4, 16, 64
STEPS = ("ordinary", "uncommon", "rare", "flagged")
TERMINAL = ("", "\x1b[38;5;178m", "\x1b[38;5;208m", "\x1b[4;38;5;196m")  # readable on light and on dark
FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Token:
    """A token, and what the model knew when it was to come; None where the file does not say."""

    text: str
    given: bool  #: part of the prompt
    score: float | None = None  #: how strange the place is
    pvalue: float | None = None
    flagged: bool | None = None
    entropy: float | None = None  #: nats
    epistemic: float | None = None  #: nats of the entropy that are for lack of such text
    alternatives: tuple[tuple[str, float], ...] = ()  #: the most probable tokens

    def step(self, by: str) -> int:
        """Which of the four colours."""
        if by == "entropy":
            choices = 0.0 if self.entropy is None else math.exp(self.entropy)
            return sum(choices >= limit for limit in (OPEN, WIDE, ENDLESS))
        if self.flagged:
            return 3
        return 0 if self.pvalue is None else sum(self.pvalue <= limit for limit in (UNCOMMON, RARE))


class Uncertainty:
    """Reads what the model says beside its logits."""

    def __init__(self, folder: Path, tokenizer: Any):
        self.names: dict[str, str] = json.loads((folder / NAMES).read_text(encoding="utf-8"))["outputs"]
        self.tokenizer = tokenizer

    def read(self, generator: Any) -> list[dict[str, Any]]:
        """For each token that was fed last: what is known of the one behind it."""
        found = {role: generator.get_output(name) for role, name in self.names.items() if role in _READ}
        length = next((array.shape[1] for array in found.values() if array.ndim > 1), 0)
        return [self._at(found, place) for place in range(length)]

    def _at(self, found: dict[str, Any], place: int) -> dict[str, Any]:
        here = {role: array[0, place] for role, array in found.items() if array.ndim > 1}
        known: dict[str, Any] = {
            role: float(here[role]) for role in ("score", "pvalue", "entropy", "epistemic") if role in here
        }
        if "ood" in here:
            known["flagged"] = bool(here["ood"])
        if "probs" in here:
            probabilities = here["probs"]
            best = probabilities.argsort()[::-1][:MOST_ALTERNATIVES]
            tokens = here["tokens"][best] if "tokens" in here else best
            known["alternatives"] = tuple(
                (self.tokenizer.decode([int(token)]), float(probabilities[at]))
                for at, token in zip(best, tokens)
            )
        return known


_READ = ("score", "pvalue", "ood", "entropy", "epistemic", "probs", "tokens")


def generate(folder: Path, prompt: str, most: int, chat: bool, search: dict[str, Any]) -> Iterator[Token]:
    """The tokens of the prompt, then those that are generated, one after another."""
    model = og.Model(str(folder))
    tokenizer = og.Tokenizer(model)
    if chat:
        messages = json.dumps([{"role": "user", "content": prompt}])
        prompt = tokenizer.apply_chat_template(messages=messages, add_generation_prompt=True)
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        raise SystemExit("the prompt has no tokens")
    if min(ids) < 0:
        raise SystemExit(
            "onnxruntime-genai does not understand this tokenizer.json: a part of the prompt has no token"
        )
    room = _room(folder)
    if len(ids) >= room:
        raise SystemExit(f"the prompt has {len(ids)} tokens, and the model takes {room} with its answer")
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=min(len(ids) + most, room), batch_size=1, **search)
    generator, stream = og.Generator(model, params), tokenizer.create_stream()
    uncertainty = Uncertainty(folder, tokenizer)
    generator.append_tokens(ids)
    known = uncertainty.read(generator)
    yield Token(stream.decode(ids[0]), given=True)  # nothing is known in front of the first
    for token, entry in zip(ids[1:], known):
        yield Token(stream.decode(token), given=True, **entry)
    while not generator.is_done():
        generator.generate_next_token()
        # The outputs are of the run that this token was drawn from; its own run comes with the next.
        entry = uncertainty.read(generator)[-1]
        yield Token(stream.decode(int(generator.get_next_tokens()[0])), given=False, **entry)


def _room(folder: Path) -> int:
    """How many tokens the model takes at most."""
    settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    return int(settings["model"].get("context_length", sys.maxsize))


# -------------------------------------------------------------------------- terminal


def coloured(token: Token, by: str, colours: bool) -> str:
    """The text of a token as a terminal shows it."""
    if not colours:
        return token.text
    paint = TERMINAL[token.step(by)]
    return f"{FAINT * token.given}{paint}{token.text}{PLAIN}" if paint or token.given else token.text


def told(tokens: list[Token]) -> str:
    """A sentence about all that was generated."""
    made = [token for token in tokens if not token.given]
    text = f"{len(made)} tokens"
    if any(token.flagged is not None for token in made):
        text += f", {sum(bool(token.flagged) for token in made)} flagged as strange"
    entropies = [token.entropy for token in made if token.entropy is not None]
    if entropies:
        text += f"; the next token was as open as a choice of {math.exp(sum(entropies) / len(entropies)):.3g}, on average"
    return text


def legend(by: str, colours: bool) -> str:
    if not colours:
        return ""
    words = STEPS if by == "pvalue" else ("clear", f"≥ {OPEN} choices", f"≥ {WIDE}", f"≥ {ENDLESS}")
    return "   ".join(f"{paint}{word}{PLAIN if paint else ''}" for paint, word in zip(TERMINAL, words))


# ------------------------------------------------------------------------------ page

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --page: #fff; --text: #1c1e21; --faint: #68707a; --line: #dfe3e8;
  --s1: #fdf1bf; --s2: #fcd3a1; --s3: #f8b4ae; --mark: #b42318; --bar: #7a9cc6; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #16181c; --text: #e6e8eb; --faint: #98a1ac; --line: #33383f;
  --s1: #4a4316; --s2: #66410f; --s3: #7a2a25; --mark: #ff8f85; --bar: #4f74a3; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 46rem; padding: 2rem 1.25rem 15rem; background: var(--page); color: var(--text);
  font: 17px/1.75 system-ui, sans-serif; }}
h1 {{ font-size: 1.15rem; margin: 0 0 .25rem; }}
.told, .legend, .about {{ color: var(--faint); font-size: .85rem; line-height: 1.5; margin: .25rem 0; }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--line); margin-top: 1rem; padding-top: 1rem; }}
.given.s0 {{ color: var(--faint); }}
.given {{ font-style: italic; }}
.text span {{ border-radius: .2em; padding: .1em 0; }}
.s1 {{ background: var(--s1); }} .s2 {{ background: var(--s2); }} .s3 {{ background: var(--s3); }}
.s3 {{ text-decoration: underline; text-decoration-color: var(--mark); text-decoration-thickness: 2px; text-underline-offset: .2em; }}
.text span:hover, .text span:focus, .text .on {{ outline: 2px solid var(--bar); cursor: pointer; }}
.legend span {{ border-radius: .2em; padding: .1em .4em; color: var(--text); }}
#panel {{ position: fixed; inset: auto 0 0 0; background: var(--page); border-top: 1px solid var(--line); padding: .75rem 1.25rem; }}
#panel > div {{ max-width: 43.5rem; margin: 0 auto; display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem;
  font-size: .85rem; line-height: 1.6; min-height: 8.5rem; }}
#panel table {{ border-collapse: collapse; width: 100%; }} #panel td {{ padding: 0 .5rem 0 0; vertical-align: middle; }}
#panel td:last-child {{ text-align: right; font-variant-numeric: tabular-nums; }}
@media (max-width: 36rem) {{ #panel > div {{ grid-template-columns: 1fr; min-height: 14rem; }} body {{ padding-bottom: 20rem; }} }}
code {{ font: .95em ui-monospace, monospace; white-space: pre; }}
.bar {{ display: block; height: .6em; background: var(--bar); border-radius: .2em; min-width: 1px; }}
td.wide {{ width: 50%; }}
</style></head><body>
<h1>{title}</h1>
<p class="told">{told}</p>
<p class="legend">{legend}</p>
<p class="about">{about}</p>
<div class="text" id="text">{text}</div>
<div id="panel"><div></div></div>
<script>
const tokens = {data};
const panel = document.querySelector("#panel > div");
const row = (name, value) => value == null ? "" : `<tr><td>${{name}}</td><td>${{value}}</td></tr>`;
const shown = text => "<code>" + JSON.stringify(text).slice(1, -1).replace(/[&<>]/g, c => `&#${{c.charCodeAt()}};`) + "</code>";
const number = x => x == null ? null : x.toPrecision(3);
function show(at) {{
  const t = tokens[at];
  const choices = t.entropy == null ? null : `${{number(t.entropy)}} nats, a choice of ${{number(Math.exp(t.entropy))}}`;
  const left = row("token", shown(t.text)) + row("strangeness", number(t.score)) + row("p-value", number(t.pvalue))
    + row("flagged", t.flagged == null ? null : t.flagged ? "yes" : "no") + row("entropy", choices)
    + row("of it, unknown", t.epistemic == null ? null : number(t.epistemic) + " nats");
  const right = t.alternatives.map(([text, p]) => `<tr><td>${{shown(text)}}</td><td class="wide"><span class="bar" style="width:${{100 * p}}%"></span></td><td>${{(100 * p).toFixed(1)}} %</td></tr>`).join("");
  document.querySelectorAll(".text .on").forEach(span => span.classList.remove("on"));
  document.querySelector(`[data-at="${{at}}"]`).classList.add("on");
  panel.innerHTML = `<table>${{left}}</table><table>${{right}}</table>`;
}}
for (const kind of ["mouseover", "focusin", "click"])
  document.getElementById("text").addEventListener(kind, event => {{ if (event.target.dataset.at) show(+event.target.dataset.at); }});
show({first});
</script></body></html>
"""

_ABOUT = {
    "pvalue": "Colour: how strange the place in the text was to the model when the token was to come. Strange is unlike the "
    "calibration text; a known phrase that is false is not strange. The prompt is in italics.",
    "entropy": "Colour: how open the token was, as a choice among so many. The prompt is in italics.",
}


def page(title: str, tokens: list[Token], by: str) -> str:
    """A page that needs nothing beside itself, light or dark as its reader has it."""
    words = STEPS if by == "pvalue" else ("clear", f"≥ {OPEN} choices", f"≥ {WIDE}", f"≥ {ENDLESS}")
    spans = [
        f'<span class="{"given " * token.given}s{token.step(by)}" data-at="{at}" tabindex="0">{html.escape(token.text)}</span>'
        for at, token in enumerate(tokens)
    ]
    return PAGE.format(
        title=html.escape(title),
        told=html.escape(told(tokens)),
        legend=" ".join(
            f'<span class="s{step}">{html.escape(word)}</span>' for step, word in enumerate(words)
        ),
        about=_ABOUT[by],
        text="".join(spans),
        first=_first_shown(tokens, by),
        data=json.dumps([asdict(token) for token in tokens]).replace(
            "<", "\\u003c"
        ),  # nothing ends the script
    )


def _first_shown(tokens: list[Token], by: str) -> int:
    """The token whose numbers are shown first: of those that were generated the one that stands out most."""
    made = [at for at, token in enumerate(tokens) if not token.given] or [0]
    unusual = {at: (tokens[at].step(by), -(tokens[at].pvalue or 0.0)) for at in made}
    return max(made, key=lambda at: unusual[at])


# --------------------------------------------------------------------------- program


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt")
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="the model; the folder of this program unless given"
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument(
        "--max-tokens", type=int, default=100, metavar="N", help="generate at most so many (100)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sample; the most probable token unless given"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument(
        "--by", choices=("pvalue", "entropy"), default="pvalue", help="what the colour is of (pvalue)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each token with its numbers")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    sampling = given.temperature is not None
    search = {"do_sample": sampling, "random_seed": given.seed}
    search |= {"temperature": given.temperature} if sampling else {"top_k": 1}
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    tokens = []
    try:
        for token in generate(given.folder, given.prompt, given.max_tokens, given.chat, search):
            tokens.append(token)
            print(coloured(token, given.by, colours), end="", flush=True)
    except KeyboardInterrupt:  # enough: what there is can still be looked at
        pass
    print("\n")
    if not tokens:
        return
    print(*filter(None, [legend(given.by, colours), told(tokens)]), sep="\n", file=sys.stderr)
    if given.html:
        given.html.write_text(page(given.prompt, tokens, given.by), encoding="utf-8")
    if given.json:
        text = json.dumps([asdict(token) for token in tokens], indent=1)
        given.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
