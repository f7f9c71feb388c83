"""The toy world of the demo and the course: generated pictures, their texts, and the pretraining of small backbones."""
