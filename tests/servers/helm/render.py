"""Render a chart with Helm's own library for each of some values, and lint it: `render.py CHART VALUES...`, values as JSON."""

import json
import sys

import helm_python

directory, *given = sys.argv[1:]
chart = helm_python.Chart.load(directory)
answers = []
for values in map(json.loads, given):
    try:
        rendered = chart.render(values, name="quantdrift", namespace="quantdrift", revision=3)
        answers.append({"rendered": rendered, "refused": ""})
    except helm_python.HelmError as error:
        answers.append({"rendered": {}, "refused": str(error)})
messages = [message["error"] for message in helm_python.lint(directory)["messages"]]
sys.stdout.write(json.dumps({"answers": answers, "lint": messages}))
