"""All replicas of a model: the decisions that router, controller and simulator share."""
