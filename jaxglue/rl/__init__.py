"""Reinforcement learning: prompts are answered by the model in training, answers rewarded, and packed into batches."""
