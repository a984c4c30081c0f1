//! Checks of a device against formulas and against the reference implementation: `pellucid selftest` and the tests of
//! every backend.
//!
//! The goldens are part of the program, so that it can check a machine that has neither a compiler nor this repository.
//! A check fails by panicking, like a test, and its report is the message of the panic. This crate knows no device:
//! callers hand it a `Backend`.

#![forbid(unsafe_code)]

mod embedded_goldens;
mod event_collector;
mod golden;
mod runner;
pub mod suites;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_model::Model;
use pellucid_tensor::{Backend, Extension};

pub use event_collector::{EventCollector, Outcome};
pub use golden::{Golden, goldens, goldens_folder};
pub use runner::{Runner, TestSequence};

use crate::suites::{
    batch_invariance, chained_drafts, digests, fused_operations, look_ahead, models, operations, predictors,
    residual_stream, speculation,
};

/// The result of one check.
#[derive(Debug)]
pub struct Report {
    pub name: String,
    pub took: Duration,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// The device refuses the model and says what it lacks.
    Refused(String),
    /// The message of the failed assertion.
    Failed(String),
}

/// Runs every check and passes each report to `on_report` as soon as it is known. `folder` is an empty folder for the
/// goldens' files.
///
/// Each golden runs twice. With its weights widened to f32, the device must agree with the reference as closely as any
/// other. With its weights as stored, a device that rounds activations to the weights' 16 bits is allowed the effect of
/// that rounding.
///
/// `keeps_bits` is false for a device in its fast mode, which does not guarantee batch invariance.
pub fn run(
    backend: &Arc<dyn Backend>,
    folder: &Path,
    keeps_bits: bool,
    on_report: &mut dyn FnMut(&Report),
) -> Vec<Report> {
    let mut reports = Reports { all: Vec::new(), on_report };
    for (name, body) in operations::checks() {
        reports.check(name, &|| body(&**backend));
    }
    reports.check("weights uploaded in many pieces", &|| operations::large_weights(&**backend));
    if keeps_bits {
        check_bits(&**backend, &mut reports);
    }
    let digests_rows = backend.digest_len(1).is_some();
    if digests_rows {
        reports.check("digests equal the sampler's, to the bit", &|| digests::digests_equal_the_samplers(&**backend));
        reports.check("digests at the end of replayed steps", &|| {
            models::digests_of_steps(backend, &embedded_goldens::write("llama3", folder));
        });
    }
    if keeps_bits && digests_rows && backend.is_asynchronous() {
        for name in ["llama3", "qwen3-moe", "gpt2"] {
            reports.check(&format!("looking ahead gives the same replies, {name}"), &|| {
                let golden = embedded_goldens::write(name, folder);
                let load =
                    || -> Box<dyn Model> { Box::new(Runner::load(&golden.folder, backend.clone(), None, 1).model) };
                look_ahead::look_ahead_keeps_replies(&load, backend);
            });
        }
    }
    if keeps_bits {
        for name in ["llama3", "qwen3-moe", "gpt2"] {
            reports.check(&format!("drafts change no reply, {name}"), &|| {
                let golden = embedded_goldens::write(name, folder);
                let load =
                    || -> Box<dyn Model> { Box::new(Runner::load(&golden.folder, backend.clone(), None, 1).model) };
                speculation::drafts_change_no_reply(&load, backend);
            });
        }
    }
    check_predictors(backend, &folder.join("predictors"), keeps_bits, &mut reports);
    if keeps_bits {
        for name in ["llama3", "qwen3-moe", "qwen35", "gemma4-small"] {
            let golden = embedded_goldens::write(name, folder);
            if models::refusal(backend, &golden).is_none() {
                let name = format!("parts on two devices give the bits of one, {name}");
                reports.check(&name, &|| models::parts_on_two_devices(backend, &golden));
            }
        }
    }
    if backend.token_slots().num_slots > 0 {
        reports.check("chained drafts equal single steps", &|| {
            let [draft, target] = ["llama3", "qwen3-moe"].map(|name| embedded_goldens::write(name, folder));
            chained_drafts::chained_drafts_equal_single_steps(backend, &draft, &target);
        });
    }
    // A device that keeps rows of logits in its own memory also fuses operations on wide rows, which no golden has.
    if keeps_bits && digests_rows {
        for scheme in ["bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m"] {
            let name = format!("wide layers have the same bits in any chunks, {scheme}");
            reports.check(&name, &|| models::wide_layers(backend, "llama-3.1-8b", scheme));
        }
        for scheme in ["bf16", "q8_0", "q4_k_m"] {
            let name = format!("wide experts have the same bits in any chunks, {scheme}");
            reports.check(&name, &|| models::wide_layers(backend, "qwen3-30b-a3b", scheme));
        }
        for (extension, what, shape) in [
            (Extension::DeltaNet, "wide delta nets", "qwen3.5-0.8b"),
            (Extension::Mamba2, "wide Mamba-2 layers", "granite-4.0-h-1b"),
            (Extension::LatentAttention, "wide latent attention", "deepseek-v2-lite"),
        ] {
            for scheme in ["bf16", "q4_k_m"] {
                if backend.supports(extension) {
                    let name = format!("{what} have the same bits in any chunks, {scheme}");
                    reports.check(&name, &|| models::wide_layers(backend, shape, scheme));
                }
            }
        }
        if backend.supports(Extension::AttentionSinks) {
            for scheme in ["mxfp4", "bf16"] {
                let name = format!("wide experts with biases have the same bits in any chunks, {scheme}");
                reports.check(&name, &|| models::wide_layers(backend, "gpt-oss-20b", scheme));
            }
        }
    }
    for name in embedded_goldens::names() {
        if let Some(why) = models::refusal(backend, &embedded_goldens::write(name, folder)) {
            reports.add(&format!("model {name}"), Duration::ZERO, Verdict::Refused(why));
            continue;
        }
        reports.check(&format!("model {name}, in f32"), &|| {
            let golden = embedded_goldens::write(name, &folder.join("widened"));
            models::matches_golden_in_f32(backend, &golden, keeps_bits);
        });
        reports.check(&format!("model {name}, as stored"), &|| {
            models::matches_golden_as_stored(backend, &embedded_goldens::write(name, folder), keeps_bits);
        });
    }
    reports.all
}

/// Checks the layers with which some models predict further tokens.
fn check_predictors(backend: &Arc<dyn Backend>, folder: &Path, keeps_bits: bool, reports: &mut Reports<'_>) {
    for (name, folder) in embedded_goldens::write_predictors(&folder.join("widened")) {
        reports.check(&format!("layer that predicts further tokens, {name}"), &|| {
            models::widen(&folder);
            predictors::predictions_equal_the_references(&folder, &folder, backend);
        });
    }
    for (name, folder) in embedded_goldens::write_predictors(folder) {
        if keeps_bits {
            reports.check(
                &format!("drafts of the layer that predicts further tokens change no reply, {name}"),
                &|| {
                    speculation::predictor_changes_no_reply(&|| Box::new(predictors::load(&folder, backend)), backend);
                },
            );
        }
    }
}

/// The reports so far, and who is told of each.
struct Reports<'a> {
    all: Vec<Report>,
    on_report: &'a mut dyn FnMut(&Report),
}

impl Reports<'_> {
    /// Runs a check, which fails by a panic.
    fn check(&mut self, name: &str, body: &dyn Fn()) {
        let start = Instant::now();
        let verdict = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => Verdict::Passed,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or(panic.downcast_ref::<&str>().copied());
                Verdict::Failed(text.unwrap_or("a panic without a message").into())
            }
        };
        self.add(name, start.elapsed(), verdict);
    }

    fn add(&mut self, name: &str, took: Duration, verdict: Verdict) {
        self.all.push(Report { name: name.to_owned(), took, verdict });
        (self.on_report)(self.all.last().expect("pushed above"));
    }
}

/// Checks that the bits of a row depend neither on the other rows of the batch nor on which operations were fused.
fn check_bits(backend: &dyn Backend, reports: &mut Reports<'_>) {
    reports.check("a row has the same bits alone and among few", &|| batch_invariance::few_linear_rows(backend));
    reports.check("a row has the same bits alone and among many", &|| batch_invariance::many_linear_rows(backend));
    reports
        .check("experts give the same bits to a row alone and among many", &|| batch_invariance::expert_rows(backend));
    reports.check("attention has the same bits alone and in a chunk", &|| {
        batch_invariance::attention_rows(backend);
        batch_invariance::attention_rows_of_many_heads(backend);
    });
    reports.check("attention with sinks has the same bits alone and in a chunk", &|| {
        batch_invariance::attention_rows_with_sinks(backend);
    });
    reports
        .check("a gated product equals two products and a gate", &|| fused_operations::gated_equals_its_parts(backend));
    reports.check("a joined input equals an addition, a norm and products", &|| {
        fused_operations::joined_input_equals_its_parts(backend);
    });
    reports.check("fused attention equals rotating, storing and attending", &|| {
        fused_operations::attend_equals_its_parts(backend);
    });
    reports.check("a product into the residual stream equals a product and an addition", &|| {
        residual_stream::product_equals_its_parts(backend);
    });
    reports.check("products of a normed stream equal an addition, a norm and products", &|| {
        residual_stream::normed_products_equal_their_parts(backend);
    });
    reports.check("a gated MLP equals a norm, products, a gate and an addition", &|| {
        residual_stream::gated_mlp_equals_its_parts(backend);
    });
    reports.check("experts into the residual stream equal experts and an addition", &|| {
        residual_stream::experts_equal_their_parts(backend);
    });
}
