"""Where both ends of a restore should meet: arithmetic on seconds, nothing else.

Prefill computes in steps, each of which costs something beside its tokens, and a step may begin
before all that it attends to has come: it needs one layer of that after the other. So the last step
takes the front of what is missing and what follows the history, while the loader brings the rest,
layer by layer; steps before it take the front alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pull:
    """What both ends have still to do for a gap of `gap` blocks, in seconds.

    load_s, compute_s: of each block; fixed_s: of each step beside its tokens; rest_s: of computing
    what follows the history; left_s: until the loader has done what it is busy with.
    num_groups: in so many parts, one after the other, the layers of a load arrive; 1: what follows
    waits for all of them. is_shared: the last step leaves layers of what it takes to the loader.
    """

    gap: int
    load_s: float
    compute_s: float
    fixed_s: float
    rest_s: float
    left_s: float = 0.0
    num_groups: int = 1
    is_shared: bool = False

    def apart_s(self, taken: int) -> float:
        """Until all is there, if a step computes the next `taken` blocks, and another one what
        follows the history."""
        front_s = self.fixed_s + taken * self.compute_s if taken else 0.0
        load_s = self.left_s + (self.gap - taken) * self.load_s
        last_s = self._last_s
        return max(front_s + last_s, load_s + last_s / self.num_groups)

    def together_s(self, taken: int) -> float:
        """The same, if one step computes both."""
        computing_s = self.fixed_s + taken * self.compute_s + self.rest_s
        before_s = (self.gap - taken) * self.load_s
        if self.is_shared:
            last_s, load_s = self.fixed_s + self.rest_s, taken * self.load_s
            share = shared(computing_s, self.left_s + before_s, load_s)
            computing_s = share * computing_s + (1 - share) * last_s
        return layered_s(computing_s, before_s, self.left_s, self.num_groups)

    def share_apart(self, most: int) -> int:
        """How many blocks a step that takes them alone should compute, at most `most`; 0: the
        loader will have them sooner."""
        load_s = self.left_s + self.gap * self.load_s
        even = (load_s - self.fixed_s - self._last_s) / max(self.load_s + self.compute_s, 1e-12)
        below = max(0, int(even))
        return min(most, min(below, below + 1, key=self.apart_s))

    def share_together(self, least: int, most: int) -> int:
        """How many the last step should compute."""
        return min(range(least, most + 1), key=self.together_s)

    @property
    def _last_s(self) -> float:
        return self.fixed_s + self.rest_s if self.num_groups > 1 else 0.0


def shared(computing_s: float, begins_s: float, load_s: float) -> float:
    """Of the layers that a step computes from the first on in computing_s, and the loader brings
    from the last on in load_s, from begins_s on: the share that is the step's where they meet."""
    return min(1.0, (begins_s + load_s) / max(computing_s + load_s, 1e-12))


def layered_s(computing_s: float, load_s: float, left_s: float, num_groups: int) -> float:
    """Until a step of computing_s is done that needs the layers of a load one after the other; the
    load takes load_s, and begins in left_s (0 load_s: it is on its way, and takes as long)."""
    begins_s, takes_s = (left_s, load_s) if load_s else (0.0, left_s)
    first_s = begins_s + takes_s / num_groups
    return max(first_s + computing_s, begins_s + takes_s + computing_s / num_groups)
