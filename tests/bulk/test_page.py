"""docs/datasets.md: its example is read from the page and run."""

import json
import re
from contextlib import closing

from bulk.outputs import Outputs
from bulk.runner import Runner
from bulk.spec import Check, Input, Length, Limits, Output, Repair, Spec, read_spec
from bulk.workplace import Workplace
from tests.bulk.service import StandIn
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "datasets.md").read_text()


def test_the_page_s_example_runs(tmp_path):
    for name, kind in (("places.csv", "csv"), ("places.yaml", "yaml")):
        (tmp_path / name).write_text(re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1])
    spec = read_spec(tmp_path / "places.yaml")
    workplace = Workplace(spec, tmp_path)
    service = StandIn(lambda body: "Oh my " + body["messages"][1]["content"])
    with workplace.held(), closing(workplace.state(new=True)) as state:
        outputs = Outputs(spec, state, workplace.folder)
        runner = Runner(spec, tmp_path, state, workplace.hidden, settled=outputs.write_settled)
        runner.read(workplace.begin(state))
        runner.run(service)
        workplace.finish(state)
    found = (tmp_path / "places-out" / "data-00000-of-00001.jsonl").read_text().splitlines()
    assert [json.loads(line)["output"] for line in found][2:4] == [
        "Oh my Write one sentence about the Nile, a river."
    ] * 2


def test_the_page_names_every_field_of_a_spec():
    for struct in (Spec, Input, Output, Repair, Check, Length, Limits):
        assert [name for name in struct.__struct_fields__ if name not in PAGE] == []
