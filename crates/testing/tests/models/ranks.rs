//! Ranks: any number of them gives the bits of one, and what cannot be shared out is refused by name.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_model::{
    BLOCK_LEN, Decoder, Error, GroupMember, KvMemory, LoadOptions, Model, QuantScheme, RankIdentity, SyntheticModel,
};
use pellucid_selftest::{Runner, TestSequence, goldens, goldens_folder};
use pellucid_tensor::{Backend, Communicator, DType, Error as DeviceError, Patience};
use pellucid_testing::{InvarianceCase, cpu, invariance_cases};

const TIME_LIMIT: Duration = Duration::from_secs(20);

fn backends(isa: Isa, num_ranks: usize) -> impl Iterator<Item = Arc<dyn Backend>> {
    (0..num_ranks).map(move |_| cpu(isa, 1).expect("an available instruction set") as Arc<dyn Backend>)
}

fn identity() -> RankIdentity {
    RankIdentity::of_build("test")
}

fn load(members: Vec<GroupMember<'_>>) -> Result<Decoder, Error> {
    Decoder::load_group(members, LoadOptions::default(), &identity(), &mut |_, _| ())
}

/// Loads a model on ranks, with KV memory on rank 0.
fn runner(members: Vec<GroupMember<'_>>, kv_dtype: DType, num_blocks: usize) -> Result<Runner, Error> {
    let backend = members[0].backend.clone();
    let model = load(members)?;
    let kv = KvMemory::new(model.config(), &*backend, kv_dtype, num_blocks, BLOCK_LEN)?;
    let kv = kv.with_states(model.config(), &*backend, num_blocks)?;
    Ok(Runner::with_kv(model, kv))
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// Returns the bits of a prompt's logits, in chunks and then token by token.
fn prompt_bits(runner: &mut Runner, prompt: &[u32]) -> Vec<u32> {
    bits(&runner.prompt(prompt, &[17, 1, 1, 30], vec![1, 0]))
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).with_reference_rounding()
}

/// Names of families with parts that ranks cannot share.
fn is_refused(error: &Error) -> bool {
    matches!(error, Error::NotOnRanks { .. } | Error::TooManyRanks { .. })
}

#[test]
fn every_number_of_ranks_gives_the_bits_of_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut shared_out, mut refused) = (Vec::new(), Vec::new());
    let mut cases = invariance_cases(folder.path());
    // GGUF files store some rows and heads in another order.
    for golden in goldens() {
        let (name, prompt) = (format!("{}.gguf", golden.name), (0..60).map(|i| (i * i * 5 + i) % 96).collect());
        if let Some((path, _)) = golden.sources().into_iter().nth(1) {
            cases.push(InvarianceCase { name, path, kv_dtype: DType::F16, prompt });
        }
    }
    for case in cases {
        let checkpoint = open(&case.path);
        let on = |num_ranks| {
            let members = GroupMember::of(&checkpoint, backends(Isa::best(), num_ranks), TIME_LIMIT);
            runner(members, case.kv_dtype, 2).map(|mut runner| prompt_bits(&mut runner, &case.prompt))
        };
        let one = on(1).expect("one rank computes every model");
        for num_ranks in 2..=4 {
            let name = format!("{} on {num_ranks} ranks", case.name);
            match on(num_ranks) {
                Ok(several) => {
                    assert!(one == several, "{name}, KV in {}: the bits differ from those of one rank", case.kv_dtype);
                    shared_out.push(name);
                }
                Err(error) if is_refused(&error) => refused.push(format!("{name}: {error}")),
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
    println!("{}", refused.join("\n"));
    // Families that must stay supported: another refusal would otherwise go unnoticed.
    let families = [
        &["llama3", "llama-bias", "qwen2", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gpt2", "phi3", "gpt-oss"][..],
        // Latent attention.
        &["deepseek2", "deepseek2-lite", "deepseek3", "glm4-moe-lite"],
        // Layers with different numbers of KV heads.
        &["gemma4", "gemma4-unified"],
        // Experts without gates, and experts that read a projection.
        &["nemotron-h-moe", "nemotron-h-moe.gguf", "nemotron-h-groups", "nemotron-h-latent", "nemotron-h-latent.gguf"],
        // A dense MLP beside experts.
        &["gemma4-moe", "gemma4-moe.gguf"],
        // Norms over the queries, and over the keys, of all heads.
        &["olmo2", "olmo3", "minimax-m2", "minimax-m2.gguf"],
        // Delta nets. In GGUF files of Qwen 3.5, the value heads of a key head are not adjacent.
        &["qwen3-next", "qwen3-next.gguf", "qwen35", "qwen35.gguf", "qwen35-moe", "qwen35-moe.gguf"],
        // Short convolutions.
        &["lfm2", "lfm2.gguf", "lfm2-bias", "lfm2-moe", "lfm2-moe.gguf"],
        // Mamba-2. Norms span the outputs of all heads, or of one of two groups.
        &["granite-hybrid", "granite-hybrid.gguf", "granite-hybrid-groups", "nemotron-h", "nemotron-h.gguf"],
    ];
    for family in families.concat() {
        for num_ranks in 2..=4 {
            assert!(shared_out.contains(&format!("{family} on {num_ranks} ranks")), "{family} on {num_ranks} ranks");
        }
    }
    assert!(shared_out.contains(&"smollm2 on 3 ranks".into()), "each rank has one of three heads of one KV head");
    assert!(shared_out.iter().any(|name| name.starts_with("wide heads on 3")), "KV in every format, uneven shares");
    assert!(shared_out.iter().any(|name| name.starts_with("wide latents on 3")), "latents in every format");
    assert!(shared_out.contains(&"qwen35-text on 3 ranks".into()), "each rank has a key head of a delta net");
    assert!(shared_out.contains(&"granite-hybrid-moe on 2 ranks".into()), "each rank has one of two heads");
    assert!(refused.iter().all(|reason| reason.contains("cannot share the")), "too few heads alone: {refused:?}");
}

#[test]
fn every_instruction_set_and_format_gives_the_bits_of_one_rank() {
    let prompt: Vec<u32> = (0..40).map(|i| (i * i * 7 + i * 3) % 96).collect();
    let names = [
        "llama-3.2-1b",
        "smollm2-135m",
        "qwen3-30b-a3b",
        "gpt-oss-20b",
        "deepseek-v2-lite",
        "qwen3.5-9b",
        "granite-4.0-h-tiny",
    ];
    for name in names {
        let model = SyntheticModel::named(name).expect("a known model").miniature();
        // Every format on every instruction set would take long: one model has both.
        let has_all = name == "smollm2-135m";
        let few = ["q4_k_m", "q8_0", "bf16"].map(|name| QuantScheme::named(name).expect("a known scheme"));
        let schemes = if has_all { QuantScheme::ALL.to_vec() } else { few.to_vec() };
        for scheme in schemes.into_iter().chain([QuantScheme::MXFP4]) {
            let checkpoint = model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
            let isas: Vec<Isa> = if has_all { Isa::ALL.to_vec() } else { vec![Isa::best()] };
            for isa in isas.into_iter().filter(|isa| isa.is_available()) {
                let on = |num_ranks| {
                    let members = GroupMember::of(&checkpoint, backends(isa, num_ranks), TIME_LIMIT);
                    runner(members, DType::F16, 2).map(|mut runner| prompt_bits(&mut runner, &prompt))
                };
                let one = on(1).expect("one rank computes every model");
                for num_ranks in if has_all { 3..=3 } else { 2..=4 } {
                    let several = on(num_ranks).unwrap_or_else(|error| panic!("{name} in {}: {error}", scheme.name()));
                    assert!(one == several, "{name} in {} on {isa}, {num_ranks} ranks", scheme.name());
                }
            }
        }
    }
}

#[test]
fn rows_that_a_product_rounds_are_gathered_rounded() {
    let model = SyntheticModel::named("llama-3.2-1b").expect("a known model").miniature();
    let bytes = |scheme: &str, num_ranks: usize| {
        let scheme = QuantScheme::named(scheme).expect("a known scheme");
        let checkpoint = model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
        let members = GroupMember::of(&checkpoint, backends(Isa::best(), num_ranks), TIME_LIMIT);
        let mut runner = runner(members, DType::F16, 2).expect("several ranks");
        let before = runner.model.gather_stats().expect("several ranks").bytes;
        runner.prompt(&PROMPT, &[PROMPT.len()], vec![0]);
        let bytes = runner.model.gather_stats().expect("several ranks").bytes - before;
        (bytes as usize, runner.model.config().num_layers())
    };
    let (queries, hidden, mlp, vocab) = (4 * 64, 256, 768, 512);
    let check = |(bytes, num_layers): (usize, usize), queries: usize, mlp: usize| {
        let layer = queries + 4 * hidden + mlp + 4 * hidden;
        assert_eq!(bytes, PROMPT.len() * (num_layers * layer + 4 * vocab));
    };
    let rounded = |width: usize, group: usize| width / group * (4 + group);
    check(bytes("bf16", 2), 4 * queries, 4 * mlp);
    check(bytes("q8_0", 2), rounded(queries, 32), rounded(mlp, 32));
    // Groups of K formats have 256 values: each of three ranks has one of the MLP, and none has all heads.
    check(bytes("q4_k_m", 3), 4 * queries, rounded(mlp, 256));
}

#[test]
fn a_rank_stores_its_own_heads_alone() {
    // Bytes of keys and values of a token, and of recurrent states, on one rank and on the first of two.
    let bytes = |checkpoint: &Checkpoint| {
        [1, 2].map(|num_ranks| {
            let members = GroupMember::of(checkpoint, backends(Isa::best(), num_ranks), TIME_LIMIT);
            let model = load(members).expect("a model for two ranks");
            (model.config().kv_bytes_per_token(4), model.config().state_bytes())
        })
    };
    let synthetic = |name: &str| {
        let model = SyntheticModel::named(name).expect("a known model").miniature();
        let scheme = QuantScheme::named("q8_0").expect("a known scheme");
        bytes(&model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model"))
    };
    for [(kv, state), half] in [synthetic("llama-3.2-1b"), synthetic("qwen3.5-9b"), bytes(&golden("lfm2"))] {
        assert_eq!(half, (kv / 2, state / 2));
    }
    // Heads share the latents of deepseek, and B and C of one group: three inputs of the convolution in five layers.
    let [(latents, _), (of_rank, _)] = synthetic("deepseek-v2-lite");
    assert_eq!(of_rank, latents);
    let [(kv, state), (kv_of_rank, state_of_rank)] = synthetic("granite-4.0-h-tiny");
    assert_eq!((2 * kv_of_rank, 2 * state_of_rank), (kv, state + 5 * 3 * 2 * 128 * 4));
}

/// Exchanges the parts of two ranks in each all-gather of equal parts: an error that only the law's test can notice.
#[derive(Debug)]
struct Swapped(Box<dyn Communicator>);

impl Communicator for Swapped {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn num_ranks(&self) -> usize {
        self.0.num_ranks()
    }

    fn all_gather(&mut self, part: &[u8], lens: &[usize], all: &mut [u8]) -> Result<(), DeviceError> {
        self.0.all_gather(part, lens, all)?;
        if lens[0] == lens[1] {
            let (first, rest) = all.split_at_mut(lens[0]);
            first.swap_with_slice(&mut rest[..lens[0]]);
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], patience: Patience) -> Result<(), DeviceError> {
        self.0.broadcast(bytes, patience)
    }

    fn barrier(&mut self, patience: Patience) -> Result<(), DeviceError> {
        self.0.barrier(patience)
    }

    fn abort(&mut self, reason: &str) {
        self.0.abort(reason);
    }
}

fn golden(name: &str) -> Checkpoint {
    open(&goldens().into_iter().find(|golden| golden.name == name).expect("a golden").folder)
}

const PROMPT: [u32; 9] = [3, 14, 15, 92, 65, 35, 89, 79, 32];

#[test]
fn swapped_parts_are_noticed() {
    let checkpoint = golden("llama3");
    let mut members = GroupMember::of(&checkpoint, backends(Isa::best(), 2), TIME_LIMIT);
    let right = prompt_bits(&mut runner(members, DType::F32, 2).expect("two ranks"), &PROMPT);
    members = GroupMember::of(&checkpoint, backends(Isa::best(), 2), TIME_LIMIT);
    let members = members.into_iter().map(|member| {
        let communicator: Box<dyn Communicator> = Box::new(Swapped(member.communicator));
        GroupMember { communicator, ..member }
    });
    let wrong = prompt_bits(&mut runner(members.collect(), DType::F32, 2).expect("two ranks"), &PROMPT);
    assert!(right != wrong, "the comparison of bits does not see exchanged parts");
}

/// Copies a golden's folder and changes one byte of its weights; `at` counts from the end of the file.
fn changed_golden(name: &str, folder: &Path, at: usize) -> Checkpoint {
    let golden = goldens().into_iter().find(|golden| golden.name == name).expect("a golden");
    for entry in std::fs::read_dir(&golden.folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let mut bytes = std::fs::read(&path).expect("a file");
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let at = bytes.len() - at;
            bytes[at] ^= 0x40;
        }
        std::fs::write(folder.join(path.file_name().expect("a name")), bytes).expect("a writable folder");
    }
    open(folder)
}

#[test]
fn a_changed_weight_of_one_rank_is_refused_or_noticed() {
    let right = golden("llama3");
    let load_with = |changed: &Checkpoint| {
        let mut members = GroupMember::of(&right, backends(Isa::best(), 2), TIME_LIMIT);
        members[1].checkpoint = changed;
        runner(members, DType::F32, 2)
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    // The last byte is among the samples that ranks compare.
    let error = load_with(&changed_golden("llama3", folder.path(), 1)).expect_err("the files differ").to_string();
    assert!(error.contains("rank 1 cannot compute this model together with rank 0"), "{error}");
    assert!(error.contains("the model's files have the digest"), "{error}");
    // Between the samples, the comparison of bits sees it: the high byte of a value in the rows of rank 1.
    let expected = prompt_bits(&mut load_with(&right).expect("equal files"), &PROMPT);
    let found: Vec<_> = [301, 401, 501]
        .into_iter()
        .filter_map(|at| load_with(&changed_golden("llama3", folder.path(), at)).ok())
        .map(|mut runner| prompt_bits(&mut runner, &PROMPT))
        .collect();
    assert!(!found.is_empty(), "samples do not cover every byte");
    assert!(found.iter().all(|bits| *bits != expected), "a changed weight of rank 1 changes no bit");
}

#[test]
fn a_layer_that_predicts_further_tokens_is_refused() {
    let folder = goldens_folder().with_file_name("predictors").join("qwen3-next");
    let checkpoint = open(&folder);
    let load = |num_ranks| {
        let members = GroupMember::of(&checkpoint, backends(Isa::best(), num_ranks), TIME_LIMIT);
        let options = LoadOptions { predictor: true, ..LoadOptions::default() };
        Decoder::load_group(members, options, &identity(), &mut |_, _| ()).map(drop)
    };
    load(1).expect("one rank has it");
    let error = load(2).expect_err("several ranks have none").to_string();
    assert!(error.contains("a layer that predicts further tokens (--speculate mtp)"), "{error}");
}

#[test]
fn ranks_with_different_builds_arithmetic_or_contexts_are_refused() {
    let checkpoint = golden("llama3");
    let try_group = |change: &dyn Fn(&mut Vec<GroupMember<'_>>)| {
        let mut members = GroupMember::of(&checkpoint, backends(Isa::best(), 3), TIME_LIMIT);
        change(&mut members);
        load(members).map(drop)
    };
    try_group(&|_| ()).expect("equal ranks");
    let error = try_group(&|members| members[2].backend = cpu(Isa::Scalar, 1).expect("every machine has it"));
    let error = error.expect_err("another instruction set").to_string();
    assert!(error.contains("rank 2") && error.contains("the arithmetic is cpu (scalar) there"), "{error}");

    let members = GroupMember::of(&checkpoint, backends(Isa::best(), 2), TIME_LIMIT);
    let outcomes: Vec<String> = std::thread::scope(|scope| {
        let load = |(rank, member): (usize, GroupMember<'_>)| {
            let identity = RankIdentity::of_build(["0.1.0", "0.2.0"][rank]);
            let GroupMember { checkpoint, backend, communicator } = member;
            let options = LoadOptions::default();
            let loaded = Decoder::load_on_rank(checkpoint, backend, options, communicator, identity, &mut |_, _| ());
            loaded.expect_err("another build").to_string()
        };
        let threads: Vec<_> = members.into_iter().enumerate().map(|member| scope.spawn(move || load(member))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for error in outcomes {
        assert!(error.contains("rank 1") && error.contains("the build is 0.2.0 there, and 0.1.0 on rank 0"), "{error}");
    }
}

#[test]
fn a_rank_that_is_lost_ends_the_step_with_its_reason() {
    /// Fails in the given all-gather.
    #[derive(Debug)]
    struct Failing(Box<dyn Communicator>, usize);
    impl Communicator for Failing {
        fn rank(&self) -> usize {
            self.0.rank()
        }
        fn num_ranks(&self) -> usize {
            self.0.num_ranks()
        }
        fn all_gather(&mut self, part: &[u8], lens: &[usize], all: &mut [u8]) -> Result<(), DeviceError> {
            if self.1 == 0 {
                let (device, operation) = ("a cable".to_owned(), "all-gather");
                return Err(DeviceError::Device { device, operation, reason: "it was cut".into() });
            }
            self.1 -= 1;
            self.0.all_gather(part, lens, all)
        }
        fn broadcast(&mut self, bytes: &mut [u8], patience: Patience) -> Result<(), DeviceError> {
            self.0.broadcast(bytes, patience)
        }
        fn barrier(&mut self, patience: Patience) -> Result<(), DeviceError> {
            self.0.barrier(patience)
        }
        fn abort(&mut self, reason: &str) {
            self.0.abort(reason);
        }
    }
    let checkpoint = golden("llama3");
    let members = GroupMember::of(&checkpoint, backends(Isa::best(), 3), TIME_LIMIT);
    let members = members.into_iter().enumerate().map(|(rank, member)| {
        let communicator: Box<dyn Communicator> = match rank {
            // After the two gathers of the comparison of ranks, in the second product.
            2 => Box::new(Failing(member.communicator, 4)),
            _ => member.communicator,
        };
        GroupMember { communicator, ..member }
    });
    let mut runner = runner(members.collect(), DType::F32, 2).expect("three ranks");
    let mut step = || {
        let mut batch = pellucid_model::Batch::default();
        let ids = pellucid_model::ChunkIds::Tokens(&PROMPT);
        let state = pellucid_model::ChunkState::default();
        let chunk = pellucid_model::Chunk { ids, first_position: 0, blocks: &[0], wanted: 8..9, queries: &[], state };
        batch.push(chunk, BLOCK_LEN);
        runner.model.forward(&batch, &mut runner.kv, &mut pellucid_model::Logits::default())
    };
    for attempt in ["the step", "a later step"] {
        let error = step().expect_err("rank 2 is lost");
        assert!(matches!(error, Error::Device(DeviceError::Lost { .. })), "{attempt}: {error}");
        assert!(error.to_string().contains("rank 2: a cable failed in all-gather: it was cut"), "{attempt}: {error}");
    }
}

#[test]
fn sequences_in_a_batch_and_copies_are_the_same_on_every_rank() {
    for name in ["qwen3", "deepseek3", "qwen3-next", "lfm2", "granite-hybrid"] {
        let checkpoint = golden(name);
        let run = |num_ranks: usize| {
            let members = GroupMember::of(&checkpoint, backends(Isa::best(), num_ranks), TIME_LIMIT);
            let backend = members[0].backend.clone();
            let mut runner = runner(members, DType::F32, 8).expect("a model for every number of ranks");
            let mut first = TestSequence { blocks: vec![3, 5], len: 0 };
            let mut other = TestSequence { blocks: vec![6], len: 0 };
            let mut found = runner.step(&mut [(&mut first, &PROMPT[..]), (&mut other, &PROMPT[4..])]);
            // Copy-on-write: a fork continues in a copy of the block, while the first goes on in its own. A recurrent
            // state is in the slot of a sequence's first block, and slot 7 keeps a snapshot of it.
            let len = first.len;
            runner.kv.copy_block(&*backend, 3, 1).expect("blocks of the memory");
            for (from, to) in [(3, 7), (7, 1)] {
                runner.kv.copy_state(&*backend, from, to).expect("slots of the memory");
            }
            let mut fork = TestSequence { blocks: vec![1], len };
            found.extend(runner.step(&mut [(&mut fork, &[7, 8]), (&mut first, &[9]), (&mut other, &[1, 2, 3])]));
            found.extend(runner.step(&mut [(&mut first, &[4]), (&mut fork, &[4])]));
            // The fork starts again from the snapshot, with tokens that it had before.
            runner.kv.copy_state(&*backend, 7, 1).expect("slots of the memory");
            fork.len = len;
            let again = runner.step(&mut [(&mut fork, &[7, 8])]);
            assert!(again[..] == found[found.len() - 8..][..2], "{name} on {num_ranks} ranks: from a snapshot");
            found.extend(again);
            found.iter().map(|row| bits(row)).collect::<Vec<_>>()
        };
        let one = run(1);
        (2..=4).for_each(|num_ranks| assert!(one == run(num_ranks), "{name} on {num_ranks} ranks"));
    }
}
