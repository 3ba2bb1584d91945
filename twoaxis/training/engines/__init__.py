"""How a step is computed: `processes` shares it out, `engine` trains replicas, `parted` models in parts."""
