"""Child lists of greedy drafts that hold the text's token, for `data_gen.text_labels.branch_walks`.

The k - 1 most likely tokens are children in every draft; the last child is drawn off them. If the text's token is among
the fixed ones, the last child is a sibling, which is drawn. If not, the last child must be the text's token, which has
probability q' in the draft where the text gave it p.

Legend: M walks, m walks after their siblings are drawn, k child-list entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from data_gen.verification.distributions import divide, invert
from data_gen.verification.sorted_rows import SortedRows


def greedy_entries(
    rows: SortedRows,
    row_M: Tensor,
    x_M: Tensor,
    likely_Mk: Tensor,
    siblings: int | None,
    uniform: Callable[[int, int], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Child lists with the text's token, for m walks: the one of the M that each comes from, its list [m, k], and the
    probability that it is drafted, over that of the text's token in the text.

    `x_M` are the text's tokens after each row, `likely_Mk` the draft's k most likely ones in order, `siblings` how many
    draws of a sibling are averaged (None enumerates them), and `uniform` gives numbers in [0, 1) of a shape.
    """
    fixed_Mk, last_M = likely_Mk[:, :-1], likely_Mk[:, -1]
    off_MV = rows.q_NV[row_M].scatter_(-1, fixed_Mk, 0.0)  # q' up to a factor
    mass_M = off_MV.sum(-1, dtype=torch.float64)
    certain_M = mass_M <= 0  # the last child is fixed, too
    off_MV[certain_M.nonzero()[:, 0], last_M[certain_M]] = 1.0
    mass_M = mass_M.where(~certain_M, 1.0)
    p_M = rows.at(row_M).at(x_M.unsqueeze(-1))[0][:, 0]
    is_fixed_M = (fixed_Mk == x_M.unsqueeze(-1)).any(-1)
    last_m, fixed_m = (~is_fixed_M).nonzero()[:, 0], is_fixed_M.nonzero()[:, 0]

    x_share_m = off_MV[last_m, x_M[last_m]].double() / mass_M[last_m]
    possible = x_share_m > 0
    last_m, x_share_m = last_m[possible], x_share_m[possible]
    if siblings is None:
        sibling_m, drawn_m = (off_MV[fixed_m] > 0).nonzero().unbind(-1)
        share_m = off_MV[fixed_m[sibling_m], drawn_m].double() / mass_M[fixed_m[sibling_m]]
        fixed_m = fixed_m[sibling_m]
    else:
        drawn_mn = invert(off_MV[fixed_m], uniform(len(fixed_m), siblings).to(off_MV.device))
        fixed_m, drawn_m = fixed_m.repeat_interleave(siblings), drawn_mn.flatten()
        share_m = torch.full_like(drawn_m, 1 / siblings, dtype=torch.float64)

    source_m = torch.cat([fixed_m, last_m])
    lasts_m1 = torch.cat([drawn_m, x_M[last_m]]).unsqueeze(-1)
    entries_mk = torch.cat([fixed_Mk[source_m], lasts_m1], dim=-1)
    return source_m, entries_mk, divide(torch.cat([share_m, x_share_m]), p_M[source_m])
