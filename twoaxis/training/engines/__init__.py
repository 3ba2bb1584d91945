"""How a step is computed: `processes` shares it out, `engine` trains replicas, `distributed` models in parts."""
