"""The command line: one typed function per command.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

app = SubcommandApp()


@app.command
def verify(
    *,
    seed: int = 0,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAMILY")] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure the certificates on random instances; exit with 1 if one does not hold.

    Args:
        seed: Seed of the random instances.
        only: Families to measure: duality, neutral, blend, algebra, sequence, orders. None named is all of them.
        json_output: Print one JSON document instead of lines.
    """
    import torch

    from twoaxis.verify.run import certificates

    torch.set_num_threads(1)  # the instances are small
    results = []
    for certificate in certificates(seed, only):
        results.append(certificate)
        if not json_output:
            mark = "holds" if certificate.holds else "FAILS"
            numbers = f"{certificate.error:8.1e} <= {certificate.bound:<7.0e} {certificate.instances:4d}x"
            print(f"{mark}  {numbers}  {certificate.family:9s} {certificate.statement}", flush=True)
    failed = [c for c in results if not c.holds]
    if json_output:
        print(json.dumps(_certificates_document(seed, results), indent=1))
    else:
        print(f"{len(results) - len(failed)} of {len(results)} certificates hold (seed {seed}, float64, torch {torch.__version__})")
    return 1 if failed else 0


def _certificates_document(seed: int, results: list[Any]) -> dict[str, Any]:
    import torch

    import twoaxis

    return {
        "twoaxis": twoaxis.__version__,
        "torch": torch.__version__,
        "seed": seed,
        "holds": all(c.holds for c in results),
        "certificates": [{**c._asdict(), "holds": c.holds} for c in results],
    }


def main() -> None:
    """Entry point of the `twoaxis` command: a mistake of the user's ends in one line, not in a traceback."""
    try:
        code = app.cli(
            prog="twoaxis",
            description="Residual streams and local mixers for decoder language models.",
        )
    except ValueError as error:
        print(f"twoaxis: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("twoaxis: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
