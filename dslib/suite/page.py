"""The look of an exported page: its template and its style sheet, light and dark, no script."""

from __future__ import annotations

from dslib.notebook.source import token_css

# The names of JupyterLab's highlighting variables: show_source uses them in both places.
_LIGHT = """\
--paper:#ffffff;--ink:#1d2129;--faint:#667079;--line:#d9dee3;--panel:#f6f7f9;--link:#0b5cad;
--warn:#fdf3ec;--bad:#b3261e;
--jp-mirror-editor-keyword-color:#00702f;--jp-mirror-editor-def-color:#1554b0;
--jp-mirror-editor-builtin-color:#5b3fa0;--jp-mirror-editor-string-color:#a8261d;
--jp-mirror-editor-comment-color:#5a7373;--jp-mirror-editor-number-color:#0a6a58;
--jp-mirror-editor-operator-color:#7a2fc0;"""
_DARK = """\
--paper:#111418;--ink:#e3e6ea;--faint:#98a2ad;--line:#333a42;--panel:#1a1e24;--link:#7db7ff;
--warn:#2b211a;--bad:#ff8a80;
--jp-mirror-editor-keyword-color:#6fd08c;--jp-mirror-editor-def-color:#7db7ff;
--jp-mirror-editor-builtin-color:#c3a6ff;--jp-mirror-editor-string-color:#ff9d8a;
--jp-mirror-editor-comment-color:#8fa9a9;--jp-mirror-editor-number-color:#6fd8c0;
--jp-mirror-editor-operator-color:#d0a0ff;"""

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n"
    """\
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,-apple-system,"Segoe UI",
 Roboto,"Noto Sans","DejaVu Sans",sans-serif}
a{color:var(--link);text-decoration-thickness:1px;text-underline-offset:2px}
.page{display:grid;grid-template-columns:minmax(0,1fr);max-width:78rem;margin:0 auto;padding:1rem 1.2rem 4rem}
nav.contents{font-size:.88rem;line-height:1.4}
nav.contents ol{list-style:none;margin:0;padding:0}
nav.contents li{margin:.3rem 0}
nav.contents li.level-3{padding-left:1rem}
nav.contents a{color:var(--faint);text-decoration:none}
nav.contents a:hover{color:var(--link);text-decoration:underline}
nav.contents summary{cursor:pointer;color:var(--faint);font-weight:600}
@media (min-width:64rem){
 .page{grid-template-columns:15rem minmax(0,46rem);gap:3rem;justify-content:center}
 nav.contents{position:sticky;top:1.5rem;align-self:start;max-height:calc(100vh - 3rem);overflow-y:auto;
  padding-top:1.7rem}
}
h1,h2,h3,h4{line-height:1.25;margin:2rem 0 .7rem;text-wrap:balance}
h1{font-size:1.9rem;margin-top:1rem}h2{font-size:1.4rem;padding-top:.9rem;border-top:1px solid var(--line)}
h3{font-size:1.13rem}h4{font-size:1rem}
a.anchor-link{visibility:hidden;margin-left:.4rem;color:var(--faint);text-decoration:none}
:is(h1,h2,h3,h4):hover a.anchor-link{visibility:visible}
p,ul,ol,table,blockquote{margin:.7rem 0}
blockquote{border-left:3px solid var(--line);margin-left:0;padding-left:1rem;color:var(--faint)}
code,pre{font:.86em/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
:not(pre)>code{background:var(--panel);padding:.1em .3em;border-radius:3px}
pre{margin:0;overflow-x:auto}
.markdown div.highlight,.markdown>pre,.input{background:var(--panel);border:1px solid var(--line);
 border-radius:5px;padding:.6rem .8rem;margin:.8rem 0 .5rem}
.injected-parameters .input{padding:.3rem .7rem;font-size:.8rem;opacity:.8;margin:.2rem 0 .5rem}
.injected-parameters .note{font-size:.8rem;color:var(--faint);margin:.6rem 0 0}
details.hidden-input{margin:.8rem 0 .3rem}
details.hidden-input>summary{cursor:pointer;color:var(--faint);font-size:.85rem}
.output{margin:.5rem 0;overflow-x:auto}
.output>pre{white-space:pre-wrap;overflow-wrap:anywhere}
.stderr pre{background:var(--warn);padding:.5rem .8rem;border-radius:5px}
.error pre{border-left:3px solid var(--bad);padding:.5rem .8rem;background:var(--warn)}
.figure svg,.output img,.markdown img{max-width:100%;height:auto}
.figure svg *{stroke-linejoin:round;stroke-linecap:butt}
.figure{color:var(--ink)}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .8rem;border:0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{border-bottom:1px solid var(--faint)}
.dataframe{border:0}.dataframe td,.dataframe th{text-align:right}
math{font-family:"Latin Modern Math","STIX Two Math","XITS Math","Cambria Math","Libertinus Math",
 "DejaVu Math TeX Gyre",math;font-size:1.06em}
.equation{display:flex;align-items:center;margin:1rem 0;overflow-x:auto;overflow-y:hidden;padding:.2rem 0}
.equation math{flex:1;margin:0}
.equation-tag{padding-left:1.5rem;color:var(--faint);white-space:nowrap}
mtd.row-tag{padding-left:3em}
mtable.aligned>mtr>mtd:nth-child(odd):not(.row-tag){padding-right:0}
mtable.aligned>mtr>mtd:nth-child(even):not(.row-tag){padding-left:0}
mtable.aligned>mtr>mtd{padding-top:.4ex;padding-bottom:.4ex}
footer{display:flex;justify-content:space-between;gap:1rem;margin-top:3rem;padding-top:1rem;
 border-top:1px solid var(--line);font-size:.9rem}
@media print{nav.contents,footer{display:none}.page{display:block}}
""" + token_css(".highlight") + token_css(".dslib-source")
)

TEMPLATE = """\
{%- extends 'display_priority.j2' -%}
{% block header %}<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@TITLE@</title>
<link rel="icon" href="data:,">
<style>@STYLE@</style>
</head>
<body>
<div class="page">
@CONTENTS@
<main>
{% endblock header %}
{% block footer %}
@LINKS@
</main>
</div>
</body>
</html>
{% endblock footer %}
{% block markdowncell scoped %}
<section class="markdown">{{ cell.source | markdown2html }}</section>
{% endblock markdowncell %}
{% block codecell scoped %}
{%- set injected = 'injected-parameters' in cell.metadata.get('tags', []) %}
<section class="code{{ ' injected-parameters' if injected }}">
{{ super() }}
</section>
{% endblock codecell %}
{% block in_prompt %}{% endblock in_prompt %}
{% block output_prompt %}{% endblock output_prompt %}
{% block input scoped %}
{%- set tags = cell.metadata.get('tags', []) -%}
{%- if cell.source.strip() -%}
{%- if 'hide-input' in tags -%}
<details class="hidden-input"><summary>code</summary>
<div class="input">{{ cell.source | highlight_code(metadata=cell.metadata) }}</div></details>
{%- else -%}
{%- if 'injected-parameters' in tags -%}<p class="note">This run's parameters:</p>{%- endif -%}
<div class="input">{{ cell.source | highlight_code(metadata=cell.metadata) }}</div>
{%- endif -%}
{%- endif -%}
{% endblock input %}
{% block stream_stdout %}
<div class="output"><pre>{{ output.text | ansi2html }}</pre></div>
{% endblock stream_stdout %}
{% block stream_stderr %}
<div class="output stderr"><pre>{{ output.text | ansi2html }}</pre></div>
{% endblock stream_stderr %}
{% block error %}
<div class="output error"><pre>{{ super() }}</pre></div>
{% endblock error %}
{% block traceback_line %}{{ line | ansi2html }}
{% endblock traceback_line %}
{% block data_svg %}
<div class="output figure">{{ output.data['image/svg+xml'] | inline_svg }}</div>
{% endblock data_svg %}
{% block data_png %}
<div class="output">
<img alt="" src="data:image/png;base64,{{ output.data['image/png'] | replace('\\n', '') }}"></div>
{% endblock data_png %}
{% block data_jpg %}
<div class="output">
<img alt="" src="data:image/jpeg;base64,{{ output.data['image/jpeg'] | replace('\\n', '') }}"></div>
{% endblock data_jpg %}
{% block data_html %}
<div class="output html">{{ output.data['text/html'] | static_html }}</div>
{% endblock data_html %}
{% block data_markdown %}
<div class="output markdown">{{ output.data['text/markdown'] | markdown2html }}</div>
{% endblock data_markdown %}
{% block data_latex %}
<div class="output markdown">{{ output.data['text/latex'] | markdown2html }}</div>
{% endblock data_latex %}
{% block data_text %}
<div class="output"><pre>{{ output.data['text/plain'] | ansi2html }}</pre></div>
{% endblock data_text %}
"""
