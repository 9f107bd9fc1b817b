"""Which request sits in which decode row of the device."""

from __future__ import annotations

from jaxserve.sched.request import Request


class RowTable:
    """A mirror of the device's decode rows, which are active from row 0 without gaps.

    A vacated row stays on the device until ``compact`` says how to move the others, and the device
    must be told before its next decode: a stale row would write into blocks given away since.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._rows: list[Request | None] = []
        self._num_vacated = 0

    @property
    def num_active(self) -> int:
        """Rows that hold a request."""
        return len(self._rows) - self._num_vacated

    def active(self) -> list[Request]:
        """Requests in row order, vacated rows left out; row b holds entry b after ``compact``."""
        return [request for request in self._rows if request is not None]

    def at(self, row: int) -> Request | None:
        """The request in ``row``; None where it is vacated or was never taken."""
        return self._rows[row] if row < len(self._rows) else None

    def append(self, request: Request) -> int:
        """Seat ``request`` in the row after the last and return it; call after ``compact``."""
        request.row = len(self._rows)
        self._rows.append(request)
        return request.row

    def vacate(self, request: Request) -> None:
        """Take ``request`` out of its row."""
        assert request.row is not None
        self._rows[request.row] = None
        self._num_vacated += 1
        request.row = None

    def compact(self) -> list[int] | None:
        """Close the gaps with as few moves as there are gaps below the last row kept.

        Returns the permutation the device must apply (entry b: the row that row b takes its state
        from, -1 to empty it; max_num_seqs entries), or None when no row was vacated.
        """
        if not self._num_vacated:
            return None
        old, kept = self._rows, self.num_active
        movers = (b for b in range(kept, len(old)) if old[b] is not None)
        sources = [b if old[b] is not None else next(movers) for b in range(kept)]
        self._rows = [old[source] for source in sources]
        for b, request in enumerate(self._rows):
            assert request is not None
            request.row = b
        self._num_vacated = 0
        return sources + [-1] * (self._max_num_seqs - kept)
