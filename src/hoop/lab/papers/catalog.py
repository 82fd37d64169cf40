"""The studies by name, for ``hoop reproduce``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from hoop.errors import NotFound
from hoop.lab.papers.experiment import Experiment
from hoop.lab.papers.findings import Findings


@dataclass(frozen=True)
class Study:
    """A paper and its question. The module of this name has a ``run`` that repeats its experiments."""

    name: str
    paper: str
    question: str

    def run(self, experiment: Experiment) -> Findings:
        module = importlib.import_module(f"hoop.lab.papers.{self.name.replace('-', '_')}")
        run: Callable[[Experiment], Findings] = module.run
        return run(experiment)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "mnist-pipeline",
            "H. Zheng: Distributed Machine Learning Pipeline for MNIST. Yale, CS526, 2024",
            "How well and how fast does an MLP learn MNIST over a ring, and what is the ring worth?",
        ),
        Study(
            "dsml",
            "A. Tibrewal, J. Baehring, M. Tu: Distributed Machine Learning. Yale, CPSC 426",
            "Is a chunked ring better, when is a device dead, and does training survive that?",
        ),
        Study(
            "ringtmp",
            "C. Hopkins: Distributed Machine Learning Systems (RingTMP). Swansea University, 2020",
            "Is a ring of model parts better than a parameter server? It set seven aims and reports no result.",
        ),
        Study(
            "parallel-mnist",
            "B. França Sobreira, C. Guedes Carneiro: Distributed Neural Network Training. Unicamp, 2024",
            "How does softmax regression speed up with cores, nodes and larger images?",
        ),
        Study(
            "hybrid",
            "M. M. H. Riyadh, K. M. S. Anjar, M. F. Mahde: Distributed Machine Learning Utilizing Multi-node "
            "Hybrid Approach. BRAC University",
            "Does a mesh of replicas and stages train MobileNetV2 on CIFAR-10 five times as fast on four nodes?",
        ),
    )
}


def study_named(name: str) -> Study:
    if name not in STUDIES:
        raise NotFound(f"study: {name!r} is none; there are {', '.join(STUDIES)}, or all")
    return STUDIES[name]
