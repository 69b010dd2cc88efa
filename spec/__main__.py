"""Command `python -m spec`: checks each specification, and that none of its rules can be left out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spec import compatibility_levels as levels
from spec.bucket_journals import ABLATIONS, Journals, Rules, State, first_state
from spec.checker import Checker, Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a promise does not hold, or a rule is not needed."""
    parser = argparse.ArgumentParser(prog="python -m spec", description=__doc__)
    parser.add_argument("--owners", type=int, default=Rules.owners)
    parser.add_argument("--numbers", type=int, default=Rules.numbers, help="length of a journal")
    parser.add_argument("--cycles", type=int, default=Rules.cycles, help="cycles of each owner")
    parser.add_argument("--heads", type=int, default=Rules.heads, help="times that each owner writes the head")
    parser.add_argument("--walks", type=int, default=Rules.walks, help="times that each owner reads the partition")
    given = parser.parse_args(arguments)
    bounds = vars(given)
    whole = check(Rules(**bounds))
    print(f"a partition in a bucket, {bounds}: {_text(whole)}")
    failed = whole.broken is not None
    for name, rules in ABLATIONS.items():
        found = check(rules)
        print(f"  {name}: {_text(found)}")
        failed = failed or found.broken is None
    whole = check_levels(levels.Rules())
    print(f"the compatibility level: {_text(whole)}")
    failed = failed or whole.broken is not None
    for name, without in levels.ABLATIONS.items():
        found = check_levels(without)
        print(f"  {name}: {_text(found)}")
        failed = failed or found.broken is None
    return int(failed)


def check(rules: Rules) -> Result:
    """Check the model of a partition in a bucket under these rules."""
    checker: Checker[State] = Checker(Journals(rules).steps)
    return checker.check(first_state(rules), lambda states, depth: print(f"… depth {depth}: {states:,} states", end="\r", file=sys.stderr))


def check_levels(rules: levels.Rules) -> Result:
    """Check the model of the compatibility level under these rules."""
    model = levels.CompatibilityLevels(rules)
    return Checker(model.steps).check(model.first())


def _text(result: Result) -> str:
    where = f"{result.states:,} states, {result.depth} steps deep, {result.seconds:.1f} s"
    if result.broken is None:
        return f"holds ({where})"
    return "\n    ".join([f"BROKEN: {result.broken} ({where})", *result.trace])


if __name__ == "__main__":
    sys.exit(main())
