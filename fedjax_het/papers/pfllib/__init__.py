"""PFLlib's leaderboard: personalized methods on Fashion-MNIST."""
