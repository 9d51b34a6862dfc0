# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Several whole blocks in a row, so that little of it is padding."""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items into rows by best-fit decreasing.

    Each item, longest first, goes to the row with the least room that still takes it: at most about 11/9 of the fewest
    rows that are possible (Johnson 1974).

    Args:
        lengths: (items,) integers, at most ``capacity``.
        capacity: of a row.

    Returns:
        The items of every row, in the order in which rows were begun.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms = 0  # bit r is set where a row with room r is open
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        open_rows[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
