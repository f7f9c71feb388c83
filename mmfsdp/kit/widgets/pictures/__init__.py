"""Pictures of the plan: units, memory at rest and over a step, and what moves between ranks."""
