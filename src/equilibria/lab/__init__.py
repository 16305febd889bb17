"""The papers, re-run: problems, networks, data, trainings, experiments and the demo."""
