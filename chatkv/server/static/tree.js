// The turns of a conversation form a tree; what is shown is the way to its head.

export class Tree {
  constructor(turns, head) {
    this.byId = new Map(turns.map((turn) => [turn.id, turn]));
    this.head = head;
    this.children = new Map();
    for (const turn of [...turns].sort((one, other) => (one.id < other.id ? -1 : 1))) {
      const beside = this.children.get(turn.parent) ?? [];
      this.children.set(turn.parent, [...beside, turn]);
    }
  }

  /** From the first turn to the head. */
  get path() {
    const found = [];
    for (let turn = this.byId.get(this.head); turn; turn = this.byId.get(turn.parent)) found.unshift(turn);
    return found;
  }

  /** Which of how many a turn is among those that follow the same one; null where it is alone. */
  place(turn) {
    const beside = this.children.get(turn.parent) ?? [];
    if (beside.length < 2) return null;
    return { index: beside.findIndex((other) => other.id === turn.id), beside };
  }

  /** The end of the way that was taken last from `turn` on. */
  endOf(turn) {
    let end = turn;
    for (let next; (next = this.children.get(end.id)); ) end = next.at(-1);
    return end;
  }

  /** What follows the head: left behind by going back. */
  get leftBehind() {
    return this.children.get(this.head ?? null) ?? [];
  }
}
