"""One way to show things: a `Document` of blocks, written to a terminal, to Markdown, to a page and to figures.

    result.document() ──► Document ──┬──► terminal.render(document)      text of a given width, colours on a terminal
                                     ├──► markdown.render(document)      files and web sites
                                     ├──► page.render(document)          one HTML file that needs nothing else
                                     └──► figures.svg(chart), .png       drawings for papers, docs and pages

A feature writes one function, from its result to a document; everything else is here. Nothing heavy is imported before
something is shown.
"""
