"""The page *Predicted beside published* has what others measured, and what is predicted now."""

from tests.bench.published import DATA, PAGE, predicted_memory, predicted_times, published_seconds, settings


def page_rows(name):
    """Return the rows of cells of a table of the page."""
    table = PAGE.read_text().split(f"<!-- bench: {name} -->\n")[1].split("<!-- bench end -->")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_each_measurement_is_on_the_page_with_source_date_and_settings():
    for name in ("memory", "seconds"):
        shown = page_rows(name)
        assert len(shown) == len(DATA[name])
        for row, cells in zip(DATA[name], shown, strict=True):
            where = DATA["sources"][row["source"]]
            assert where["url"] in cells[0] and str(where["date"]) in cells[0]
            assert settings(row) in cells[1] and str(row["published"]) in cells[3]
    assert len(DATA["memory"]) >= 10


def test_published_steps_lie_in_the_range_and_near_the_one_number():
    """Fused kernels of others are faster than that."""
    errors = {False: [], True: []}
    for row, cells in zip(DATA["seconds"], page_rows("seconds"), strict=True):
        assert 1 <= float(cells[-3]) <= 1.6, cells
        compiled = row.get("fsdp", {}).get("compile_units", False)
        assert compiled == ("compiled" in row["assumed"])
        if row["source"] != "automodel_lora":
            errors[compiled].append(abs(float(cells[-1].rstrip("%"))))
    assert [len(found) >= 4 for found in errors.values()] == [True, True]
    assert max(errors[False] + errors[True]) <= 10


def test_the_page_shows_what_is_predicted_now():
    # The smallest models; all of them take minutes.
    rows = DATA["memory"]
    index = next(i for i, row in enumerate(rows) if row["model"] == "llama32_1b" and row["gpus"] == 8)
    assert page_rows("memory")[index][4] == f"{predicted_memory(rows[index]):.2f}"
    rows = DATA["seconds"]
    index = next(i for i, row in enumerate(rows) if row["model"] == "llama2_7b")
    times = predicted_times(rows[index])
    assert page_rows("seconds")[index][-2] == f"{times.usual:.2f}"
    assert page_rows("seconds")[index][5] == f"{times.overlapped:.2f} to {times.slowest:.2f}"
    assert times.overlapped <= published_seconds(rows[index]) <= times.slowest
