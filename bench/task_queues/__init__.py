"""Python task queues doing the same job: `bench/workers.py` measures them.

A system is a module `…_jobs.py`: its handler, its settings and its producer, as its documentation has them. These modules, `job_record` and
`job_producer` run in the system's own environment, which has neither Sluiceway nor its dependencies.
"""

from __future__ import annotations
