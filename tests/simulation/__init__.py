"""A seeded simulator: the real queue, a false clock, and everything that can go wrong, checked against a plain model.

``python -m tests.simulation --seed 7`` runs one history. It is single-threaded and the same each time.

* ``scenario`` draws the rules of a history from its seed.
* ``actors`` decide who calls what; ``operations`` and ``tending`` are those calls, with what the model makes of each.
* ``faults`` are what goes wrong: crashes, repeats, delays, pauses, jumping clocks, lost connections.
* ``model`` says what a queue should do, with one dictionary and one item at a time.
* ``audit`` reads the log alone and says what it proves; ``checks`` holds model, log and tables against each other.
* ``driver`` runs one history on two ``site``s, with ``meanwhile`` a reader; ``record`` and ``report`` tell about it.
"""
