//! A device against its formulas and against the reference implementation, from the program alone: `pellucid selftest`.
//!
//! The goldens are part of the program. A check fails by panicking, like a test, and the panic's words are its report.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_model::{Model, QuantScheme, SyntheticModel};
use pellucid_tensor::{Backend, DType, RowDigest, RowQuery, quant};

use crate::{Golden, Runner, TestSequence, ahead_suite, backend_suite, digest_suite, fused_suite, row_suite};

/// One golden's files: name, config.json, golden.json, logits.bin, model.safetensors.
type Files = (&'static str, [(&'static str, &'static [u8]); 4]);

macro_rules! golden {
    ($name:literal) => {
        (
            $name,
            [
                golden!($name, "config.json"),
                golden!($name, "golden.json"),
                golden!($name, "logits.bin"),
                golden!($name, "model.safetensors"),
            ],
        )
    };
    ($name:literal, $file:literal) => {
        ($file, include_bytes!(concat!("../fixtures/goldens/", $name, "/", $file)))
    };
}

static GOLDENS: [Files; 23] = [
    golden!("gemma2"),
    golden!("gemma3"),
    golden!("gemma3-old"),
    golden!("gpt2"),
    golden!("llama-bias"),
    golden!("llama-linear"),
    golden!("llama2"),
    golden!("llama3"),
    golden!("llama3-old"),
    golden!("mistral"),
    golden!("mixtral"),
    golden!("phi3"),
    golden!("phi3-longrope"),
    golden!("phi4-mini"),
    golden!("qwen2"),
    golden!("qwen2-window"),
    golden!("qwen2-yarn"),
    golden!("qwen3"),
    golden!("qwen3-moe"),
    golden!("qwen3-moe-mixed"),
    golden!("qwen3-moe-step"),
    golden!("smollm2"),
    golden!("xglm"),
];

/// Largest difference of a logit from the reference's; `tests/goldens.rs` says why.
const TOLERANCE: f32 = 1e-4;

/// Where activations are rounded to bf16 (8 bits of mantissa) before each product, the median logit of these models, of order one, moves
/// by some 0.01; a mistake in an operation moves it by as much as it is large.
const ROUNDED: f32 = 0.05;

/// How one check went.
#[derive(Debug)]
pub struct Report {
    pub name: String,
    pub took: Duration,
    /// What differed.
    pub failure: Option<String>,
}

/// Runs every check, telling each report as it comes. `folder` is an empty folder for the goldens' files.
///
/// Each model runs twice: with its weights widened to f32, where the device has to agree with the reference as closely as any, and as
/// they are stored, where a device that rounds activations to the weights' 16 bits is allowed the effect of that.
///
/// `keeps_bits` is false for a device that was asked to be fast, and makes no promise of equal bits.
pub fn run(backend: &Arc<dyn Backend>, folder: &Path, keeps_bits: bool, tell: &mut dyn FnMut(&Report)) -> Vec<Report> {
    let mut reports = Vec::new();
    let tolerance = if backend_suite::rounds_activations(&**backend) { ROUNDED } else { TOLERANCE };
    let mut check = |name: &str, body: &dyn Fn()| {
        let start = Instant::now();
        let failure = catch_unwind(AssertUnwindSafe(body)).err().map(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
        });
        reports.push(Report { name: name.to_owned(), took: start.elapsed(), failure });
        tell(reports.last().expect("pushed above"));
    };
    for (name, body) in backend_suite::checks() {
        check(name, &|| body(&**backend));
    }
    check("weights that come in many pieces", &|| backend_suite::large_weights(&**backend));
    if keeps_bits {
        check("a row has the same bits alone and among few", &|| row_suite::rows_stand_alone(&**backend));
        check("a row has the same bits alone and among many", &|| row_suite::many_rows_stand_alone(&**backend));
        check("experts give the same bits to a row alone and among many", &|| {
            row_suite::expert_rows_stand_alone(&**backend);
        });
        check("attention has the same bits alone and in a chunk", &|| {
            row_suite::attention_rows_stand_alone(&**backend);
            row_suite::tokens_of_many_heads_stand_alone(&**backend);
        });
        check("a gated product is two products and a gate", &|| {
            fused_suite::gating_at_once_changes_nothing(&**backend);
        });
        check("joining and norm with the maps after them", &|| {
            fused_suite::joining_first_changes_nothing(&**backend);
        });
        check("attending at once is turning, storing and attending", &|| {
            fused_suite::attending_at_once_changes_nothing(&**backend);
        });
    }
    if backend.digest_len(1).is_some() {
        check("digests of logits, to the sampler's bits", &|| digest_suite::digests_are_the_sampler_s(&**backend));
        let (name, files) = GOLDENS.iter().find(|(name, _)| *name == "llama3").expect("a golden");
        check("digests at the end of replayed steps", &|| digests_of_steps(backend, &write(folder, name, files)));
    }
    if keeps_bits && backend.digest_len(1).is_some() && backend.runs_ahead() {
        for name in ["llama3", "qwen3-moe", "gpt2"] {
            let (_, files) = GOLDENS.iter().find(|golden| golden.0 == name).expect("a golden");
            check(&format!("running ahead gives the same replies, {name}"), &|| {
                let golden = write(folder, name, files);
                let load =
                    || -> Box<dyn Model> { Box::new(Runner::load(&golden.folder, backend.clone(), None, 1).model) };
                ahead_suite::running_ahead_changes_nothing(&load, backend);
            });
        }
    }
    // Where rows of logits stay on a device, it also joins the operations of wide rows, which no golden has.
    if keeps_bits && backend.digest_len(1).is_some() {
        for mix in ["bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m"] {
            let name = format!("wide layers have the same bits in any chunks, {mix}");
            check(&name, &|| wide_layers(backend, "llama-3.1-8b", mix));
        }
        for mix in ["bf16", "q8_0", "q4_k_m"] {
            let name = format!("wide experts have the same bits in any chunks, {mix}");
            check(&name, &|| wide_layers(backend, "qwen3-30b-a3b", mix));
        }
    }
    for (name, files) in &GOLDENS {
        check(&format!("model {name}, in f32"), &|| {
            let golden = write(&folder.join("wide"), name, files);
            widen(&golden.folder.join("model.safetensors"));
            model(backend, &golden, TOLERANCE, keeps_bits);
        });
        check(&format!("model {name}, as stored"), &|| {
            model(backend, &write(folder, name, files), tolerance, keeps_bits);
        });
    }
    reports
}

/// Layers of a known shape with random weights: a prompt's logits have the same bits at once, token by token, and two sequences at a time.
fn wide_layers(backend: &Arc<dyn Backend>, shape: &str, mix: &str) {
    let shape = SyntheticModel::named(shape).expect("a known shape").shallow();
    let mix = QuantScheme::named(mix).expect("a known mix");
    let checkpoint = shape.checkpoint(mix, 1, &mut |_, _| ()).expect("names and shapes fit");
    for kv_dtype in [DType::F16, DType::Q8_0] {
        let mut runner = Runner::of(&checkpoint, backend.clone(), None, 32, kv_dtype);
        let prompt: Vec<u32> = (0..150).map(|i| i * 7 % 512).collect();
        let blocks = |first: u32| (first..first + 10).collect::<Vec<u32>>();
        let whole = runner.prompt(&prompt, &[prompt.len()], blocks(0));
        assert!(whole.iter().all(|logit| logit.is_finite()), "a logit is not a number");
        let expected = bits(&whole);
        assert!(bits(&runner.prompt(&prompt, &[1], blocks(10))) == expected, "token by token gives other bits");
        let mixed = runner.prompt(&prompt, &[3, 1, 9, 1, 40, 1, 2], blocks(20));
        assert!(bits(&mixed) == expected, "chunks give other bits");
        let mut pair = [10, 20].map(|first| TestSequence { blocks: blocks(first), len: 0 });
        for (i, id) in prompt.iter().enumerate() {
            let [a, b] = &mut pair;
            let rows = runner.step(&mut [(a, &[*id]), (b, &[*id])]);
            let row = &expected[i * rows[0].len()..][..rows[0].len()];
            assert!(rows.iter().all(|logits| bits(logits) == row), "two sequences at a time give other bits at {i}");
        }
    }
}

/// Puts a golden's files where a checkpoint can be opened.
fn write(folder: &Path, name: &str, files: &[(&str, &[u8])]) -> Golden {
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder).expect("a folder that can be written");
    for (file, bytes) in files {
        std::fs::write(folder.join(file), bytes).expect("a file that can be written");
    }
    Golden::read(&folder)
}

/// Turns every tensor of a safetensors file into f32.
fn widen(path: &Path) {
    let bytes = std::fs::read(path).expect("written above");
    let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
    let mut numbers: Vec<u8> = Vec::new();
    for (name, tensor) in header.as_object_mut().expect("an object") {
        if name == "__metadata__" {
            continue;
        }
        let dtype = match tensor["dtype"].as_str() {
            Some("F32") => DType::F32,
            Some("F16") => DType::F16,
            Some("BF16") => DType::BF16,
            other => panic!("{name} is stored as {other:?}"),
        };
        let place = |i: usize| tensor["data_offsets"][i].as_u64().expect("an offset") as usize;
        let stored = &bytes[8 + len..][place(0)..place(1)];
        let mut wide = vec![0f32; stored.len() / dtype.block_bytes()];
        quant::decode(dtype, stored, &mut wide);
        let start = numbers.len();
        numbers.extend(wide.iter().flat_map(|value| value.to_le_bytes()));
        tensor["dtype"] = "F32".into();
        tensor["data_offsets"] = vec![start, numbers.len()].into();
    }
    let header = header.to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &numbers].concat();
    std::fs::write(path, file).expect("a file that can be written");
}

/// Logits at every position within `tolerance`, the same bits in chunks of any size, and, where the tolerance is the least, the greedy
/// continuation.
fn model(backend: &Arc<dyn Backend>, golden: &Golden, tolerance: f32, keeps_bits: bool) {
    let (path, expected) = (golden.folder.clone(), golden.logits("logits.bin"));
    for ((prompt, expected), greedy) in golden.prompts.iter().zip(&expected).zip(&golden.greedy) {
        let context_len = golden.context_len(prompt.len());
        let mut runner = Runner::load(&path, backend.clone(), context_len, 8);
        let whole = runner.prompt(prompt, &[prompt.len()], vec![0, 1]);
        assert_eq!(whole.len(), expected.len());
        // A NaN is as wrong as can be, and a comparison would pass over it.
        let distance = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
        let mut distances: Vec<f32> = whole.iter().zip(expected).map(distance).collect();
        distances.sort_by(f32::total_cmp);
        if tolerance <= TOLERANCE {
            let worst = distances[distances.len() - 1];
            assert!(worst <= tolerance, "a logit differs from the reference by {worst}");
        } else {
            // Where activations are rounded, a router may choose another expert and move a whole row: the middle one counts.
            let middle = distances[distances.len() / 2];
            assert!(middle <= tolerance, "the median logit differs from the reference by {middle}");
        }
        // Token by token: from the third on, steps of one size may be replayed from a recording.
        let single = runner.prompt(prompt, &[1], vec![3, 2]);
        assert!(!keeps_bits || bits(&single) == bits(&whole), "token by token gives other bits than the whole prompt");
        let mixed = runner.prompt(prompt, &[5, 1, 1, 17, 2, 30], vec![5, 4]);
        assert!(!keeps_bits || bits(&mixed) == bits(&whole), "chunks give other bits than the whole prompt");
        if tolerance <= TOLERANCE && context_len.is_none_or(|len| prompt.len() + greedy.len() <= len) {
            assert_eq!(&continuation(&mut runner, prompt, greedy.len()), greedy, "greedy continuation");
        }
    }
}

/// Two sequences with the same tokens, one row after the other: the digest of the one is that of the other's row, with another query in
/// every step; and once both are told in brief.
fn digests_of_steps(backend: &Arc<dyn Backend>, golden: &Golden) {
    let prompt = &golden.prompts[0];
    let mut runner = Runner::load(&golden.folder, backend.clone(), golden.context_len(prompt.len()), 8);
    let sequence = |blocks: [u32; 2]| TestSequence { blocks: blocks.to_vec(), len: 0 };
    let (mut first, mut second, mut alone) = (sequence([0, 1]), sequence([3, 2]), sequence([5, 4]));
    for (position, token) in prompt.iter().enumerate() {
        let ids = std::slice::from_ref(token);
        let query = |seed: u64| RowQuery {
            temperature: 0.5 + 0.1 * position as f64,
            race: Some((seed, position as u32 + 1)).filter(|_| position % 5 != 4),
            shortlist: None,
        };
        let logits = runner.step_asking(&mut [(&mut first, ids), (&mut second, ids)], &[None, Some(query(7))]);
        let row = logits.row(0).to_vec();
        let num_top = backend.digest_len(row.len()).expect("it digests short rows");
        let same = |seed: u64, digest: Option<&RowDigest>| {
            let what = format!("position {position}, seed {seed}");
            digest_suite::same(&what, &row, &query(seed), num_top, digest.expect("a digest was asked for"));
        };
        assert!(logits.digest(0).is_none(), "a row that was wanted whole");
        same(7, logits.digest(1));
        same(8, runner.step_asking(&mut [(&mut alone, ids)], &[Some(query(8))]).digest(0));
    }
}

fn continuation(runner: &mut Runner, prompt: &[u32], len: usize) -> Vec<u32> {
    let mut sequence = TestSequence { blocks: vec![7, 6], len: 0 };
    let mut next = prompt.to_vec();
    let mut found = Vec::new();
    while found.len() < len {
        let logits = runner.step(&mut [(&mut sequence, &next)]);
        let last = logits.last().expect("a row of logits");
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]).then(b.cmp(&a)));
        next = vec![best.expect("a vocabulary") as u32];
        found.push(next[0]);
    }
    found
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}
