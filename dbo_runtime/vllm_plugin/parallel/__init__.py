"""Communication between ranks: collectives, experts, latent attention, agreement, pipeline stages."""
