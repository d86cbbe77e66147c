"""Training a draft for a target model on its own answers, in plain torch."""
