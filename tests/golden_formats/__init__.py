"""How each format of golden file is replayed through the library: one file per method, one line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.golden_formats.attention_residuals import check_attention_residuals, check_attention_residuals_op
from tests.golden_formats.base import Golden
from tests.golden_formats.deep_cross_attention import check_deep_cross_attention
from tests.golden_formats.deep_delta import check_deep_delta
from tests.golden_formats.denseformer import check_denseformer
from tests.golden_formats.elc_bert import check_elc_bert
from tests.golden_formats.hyper_connections import check_hyper_connections, check_manifold_hyper_connections
from tests.golden_formats.muddformer import check_muddformer
from tests.golden_formats.vertical_attention import check_vertical_attention

FORMATS: dict[str, Callable[[Golden], None]] = {
    "attnres_op": check_attention_residuals_op,
    "attnres": check_attention_residuals,
    "dca": check_deep_cross_attention,
    "ddl": check_deep_delta,
    "denseformer": check_denseformer,
    "elc_bert": check_elc_bert,
    "hc": check_hyper_connections,
    "mhc": check_manifold_hyper_connections,
    "muddformer": check_muddformer,
    "vertical_attention": check_vertical_attention,
}


def check_file(path: Path) -> int:
    """Replay one file; returns how many arrays were compared."""
    check = next((check for prefix, check in FORMATS.items() if path.stem.startswith(prefix)), None)
    if check is None:
        raise AssertionError(f"{path.name} is of no known golden format; the formats start with {', '.join(FORMATS)}")
    golden = Golden(path)
    check(golden)
    golden.finish()
    return golden.compared
