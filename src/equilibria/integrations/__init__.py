"""Watching from inside other people's trainers and loggers; nothing of theirs is imported before it is asked for.

- `equilibria.integrations.lightning.EquilibriaCallback`: for `lightning.Trainer`.
- `equilibria.integrations.transformers.EquilibriaCallback`: for `transformers.Trainer`.
- `equilibria.integrations.tensorboard.TensorBoardSink`, `wandb.WandbSink`, `mlflow.MLflowSink`: for
  ``equilibria.watch(..., sinks=[...])`` and both callbacks.
"""
