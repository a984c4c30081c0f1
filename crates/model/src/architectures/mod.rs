//! The supported model families. Each file reads a configuration, names the tensors, and describes how the family
//! differs from Llama. `docs/guides/add-a-model-family.md` explains how to add one.

mod deepseek;
mod gemma;
mod gemma4;
mod glm4_moe;
mod gpt2;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod lfm2;
mod llama;
mod minimax_m2;
mod mistral3;
mod mixtral;
mod nemotron_h;
mod olmo;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_next;
mod qwen3_vl;
mod smollm3;
mod xglm;

use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_tensor::ValueHeadOrder;

use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::config::{DecoderConfig, LayerConfig, Mixer};
use crate::loader::delta_net::DeltaNetStorage;
use crate::loader::experts::ExpertLayout;
use crate::loader::tensor_finder::{ModulePath, TensorFinder};
use crate::loader::tensor_names::{self, TensorNames};
use crate::{Error, config, predictor};

/// A model family: its names in files, and how its configuration is read.
struct Family {
    /// Name of the family in messages.
    name: &'static str,
    /// Its form as a GGUF file, if there is one. Families may share a form; a file is then read as the first of them.
    gguf: Option<&'static GgufForm>,
    /// The values of `model_type` in a Hugging Face `config.json`.
    hugging_face: &'static [&'static str],
    read_hugging_face: fn(Fields<'_>, &mut Blueprint) -> Result<(), Error>,
}

/// How GGUF files of a family are recognised and read.
struct GgufForm {
    /// The value of `general.architecture`.
    name: &'static str,
    read: fn(Keys<'_>, &mut Blueprint) -> Result<(), Error>,
}

const FAMILIES: &[Family] = &[
    llama::LLAMA,
    llama::MISTRAL,
    mixtral::MIXTRAL,
    qwen2::QWEN2,
    qwen3::QWEN3,
    qwen3::QWEN3_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    phi3::PHI3,
    gpt2::GPT2,
    xglm::XGLM,
    smollm3::SMOLLM3,
    olmo::OLMO2,
    olmo::OLMO3,
    granite::GRANITE,
    granite::GRANITE_MOE,
    granite_hybrid::GRANITE_HYBRID,
    nemotron_h::NEMOTRON_H,
    nemotron_h::NEMOTRON_H_MOE,
    qwen3_vl::QWEN3_VL,
    qwen3_vl::QWEN3_VL_MOE,
    mistral3::MISTRAL3,
    gpt_oss::GPT_OSS,
    glm4_moe::GLM4_MOE,
    deepseek::DEEPSEEK2,
    deepseek::DEEPSEEK3,
    deepseek::GLM4_MOE_LITE,
    minimax_m2::MINIMAX_M2,
    lfm2::LFM2,
    gemma4::GEMMA4,
    lfm2::LFM2_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen3_next::QWEN35,
    qwen3_next::QWEN35_MOE,
];

/// Returns the names of the supported families.
pub fn supported() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.name).collect()
}

/// A checkpoint's configuration, its tensor names and how it stores tensors.
#[derive(Debug, Clone)]
pub(crate) struct Blueprint {
    pub(crate) config: DecoderConfig,
    pub(crate) names: TensorNames,
    /// The file stores norm weights minus one.
    pub(crate) norms_minus_one: bool,
    /// The file stores matrices as `[in][out]`.
    pub(crate) transposed: bool,
    pub(crate) expert_layout: ExpertLayout,
    pub(crate) delta_net: DeltaNetStorage,
    /// Number of layers after the last of the decoder, which predict further tokens. At most the first is loaded.
    pub(crate) num_extra_layers: usize,
    /// Readers of the file find the rows of queries and keys reordered for the rotation of adjacent values, although no
    /// layer rotates them.
    pub(crate) interleaves_unrotated: bool,
    /// Whether a GGUF file has norms of queries and keys, for families in which only some models have them.
    pub(crate) has_qk_norms: bool,
    /// Whether a GGUF file has biases of routers, for families in which only some models have them.
    pub(crate) has_score_biases: bool,
    /// The output projection is the embedding table, even if the file holds a copy of it.
    pub(crate) tied: bool,
}

impl Blueprint {
    /// Adds the layer that predicts further tokens. It is like the last layer of the decoder, and has attention.
    pub(crate) fn use_predictor(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self;
        let like = config.layers.iter().rfind(|layer| layer.mixer == Mixer::Attention).copied();
        let mut with = config.clone();
        let is_possible = |layer: &LayerConfig| layer.has_mlp && layer.kv_from.is_none();
        with.predictor = like.filter(|layer| is_possible(layer) && predictor::is_possible(config));
        let path = ModulePath::new(names.predictor_join, config.num_layers());
        let tensor = TensorFinder::new(checkpoint, self).name(path, "weight");
        if checkpoint.find_tensor(&tensor).is_none() {
            return Err(Error::NoPredictor { tensor });
        }
        if with.predictor.is_none() {
            return Err(Error::PredictorNotSupported { architecture: with.architecture });
        }
        with.check()?;
        self.config = with;
        Ok(())
    }
}

/// Reads a checkpoint's configuration. `context_len` reduces the context that the model was trained for.
pub(crate) fn blueprint(checkpoint: &Checkpoint, context_len: Option<usize>) -> Result<Blueprint, Error> {
    let architecture = checkpoint.architecture()?;
    if crate::is_encoder(checkpoint)? {
        return Err(Error::IsEncoder { architecture: architecture.into() });
    }
    let unsupported = || Error::UnsupportedArchitecture { found: architecture.into() };
    let mut blueprint = match checkpoint.source() {
        Source::Gguf(metadata) => {
            let mut forms = FAMILIES.iter().filter_map(|family| Some((family, family.gguf?)));
            let (family, form) = forms.find(|(_, form)| form.name == architecture).ok_or_else(unsupported)?;
            let keys = Keys::new(metadata, architecture);
            let vocab_size = vocab_size(checkpoint, &tensor_names::GGUF)?;
            let config = config::gguf::llama(keys, checkpoint, vocab_size)?;
            let mut blueprint = Blueprint {
                config,
                names: tensor_names::GGUF,
                norms_minus_one: false,
                transposed: false,
                expert_layout: ExpertLayout::Separate,
                delta_net: DeltaNetStorage { order: ValueHeadOrder::Grouped, log_decay: false },
                num_extra_layers: 0,
                interleaves_unrotated: false,
                has_qk_norms: checkpoint.find_tensor("blk.0.attn_q_norm.weight").is_some(),
                has_score_biases: checkpoint.tensors().iter().any(|tensor| tensor.name.ends_with("exp_probs_b.bias")),
                // The format has no key for this; tied files leave the projection out.
                tied: checkpoint.find_tensor("output.weight").is_none(),
            };
            blueprint.config.architecture = family.name.into();
            (form.read)(keys, &mut blueprint)?;
            if blueprint.config.value_norm {
                find_keys_as_values(checkpoint, &mut blueprint.config);
            }
            config::gguf::refuse_unread(keys, &blueprint.config, blueprint.num_extra_layers)?;
            blueprint
        }
        Source::HuggingFace(files) => {
            let family = hugging_face_family(architecture)?;
            let fields = Fields::new(&files.config);
            let mut blueprint = Blueprint {
                config: DecoderConfig::EMPTY,
                names: tensor_names::HUGGING_FACE,
                norms_minus_one: false,
                transposed: false,
                expert_layout: ExpertLayout::Separate,
                delta_net: DeltaNetStorage { order: ValueHeadOrder::Grouped, log_decay: true },
                num_extra_layers: 0,
                interleaves_unrotated: false,
                has_qk_norms: checkpoint.find_tensor("blk.0.attn_q_norm.weight").is_some(),
                has_score_biases: false,
                tied: fields.opt_bool("tie_word_embeddings")?.unwrap_or(false),
            };
            (family.read_hugging_face)(fields, &mut blueprint)?;
            blueprint.config.architecture = family.name.into();
            blueprint.config.vocab_size = vocab_size(checkpoint, &blueprint.names)?;
            blueprint
        }
    };
    let config = &mut blueprint.config;
    if let Some(requested) = context_len {
        if requested > config.context_len {
            return Err(Error::ContextTooLong { requested, limit: config.context_len });
        }
        config.context_len = requested;
    }
    config.check()?;
    Ok(blueprint)
}

/// Marks the layers whose values are their keys: a GGUF file has no key for them, and no matrix of their values.
fn find_keys_as_values(checkpoint: &Checkpoint, config: &mut DecoderConfig) {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        let value = ModulePath::new(tensor_names::GGUF.value, i).name("weight");
        layer.keys_as_values = layer.kv_from.is_none() && checkpoint.find_tensor(&value).is_none();
    }
}

/// Returns the `general.architecture` for a GGUF file that is made from a Hugging Face folder.
pub(crate) fn gguf_name(folder: &Checkpoint) -> Result<&'static str, Error> {
    let family = hugging_face_family(folder.architecture()?)?;
    if family.name == nemotron_h::NEMOTRON_H.name && blueprint(folder, None)?.config.experts.is_some() {
        return Ok(nemotron_h::MOE_GGUF);
    }
    family.gguf.map(|form| form.name).ok_or(Error::NoGgufForm { family: family.name })
}

fn hugging_face_family(model_type: &str) -> Result<&'static Family, Error> {
    let known = FAMILIES.iter().find(|family| family.hugging_face.contains(&model_type));
    known.ok_or_else(|| Error::UnsupportedArchitecture { found: model_type.into() })
}

/// Returns the number of rows of the embedding table. Token ids must be below it.
fn vocab_size(checkpoint: &Checkpoint, names: &TensorNames) -> Result<usize, Error> {
    let candidates: Vec<String> =
        names.prefixes.iter().map(|prefix| format!("{prefix}{}.weight", names.token_embedding)).collect();
    let table = candidates.iter().find_map(|name| checkpoint.find_tensor(name));
    match table {
        None if checkpoint.tensors().is_empty() => Err(Error::NoWeights),
        Some(table) => Ok(table.info.shape.first().copied().unwrap_or(0)),
        None => Err(Error::MissingTensor { names: candidates }),
    }
}
