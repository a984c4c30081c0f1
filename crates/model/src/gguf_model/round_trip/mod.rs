//! Compares a folder's configuration with the one that a reader of the GGUF file gets, and refuses a difference.

mod settings;

use crate::Error;
use crate::config::{DecoderConfig, LayerConfig, Positions};
use crate::rope::RopeConfig;

/// Returns an error that names the first setting which a reader of the file would get wrong.
pub(super) fn check(folder: &DecoderConfig, file: &DecoderConfig) -> Result<(), Error> {
    // These may differ: the family can share the GGUF form of another, and RoPE scaling can be written in another way.
    let mut expected = folder.clone();
    expected.architecture.clone_from(&file.architecture);
    expected.leaves_out_images = file.leaves_out_images;
    expected.leaves_out_audio = file.leaves_out_audio;
    // Readers look for the matrices of values, which are described later.
    for (expected, file) in expected.layers.iter_mut().zip(&file.layers) {
        expected.keys_as_values = file.keys_as_values;
    }
    // Readers of these files look for the norms themselves.
    if folder.architecture == "glm4-moe" {
        expected.qk_norm = file.qk_norm;
    }
    // The file has a tenth of the scale, which is rounded once more.
    if let (Some(expected_latent), Some(latent)) = (&mut expected.latent_attention, file.latent_attention)
        && is_close(expected_latent.yarn_scale, latent.yarn_scale)
    {
        expected_latent.yarn_scale = latent.yarn_scale;
        expected.attention_scale = file.attention_scale;
    }
    if same_positions(folder, file) {
        expected.positions = file.positions.clone();
    }
    if expected == *file {
        return Ok(());
    }
    let (what, folder_has, file_has) = difference(&expected, file);
    let family = folder.architecture.clone();
    Err(Error::LostInGguf { family, what, folder_has, file_has })
}

fn is_close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-6 * a.abs()
}

/// Whether both rotate the same pairs by the same angles. Divisors of frequencies are rounded once more in the file.
fn same_positions(folder: &DecoderConfig, file: &DecoderConfig) -> bool {
    let (Positions::Rope { tables: ours, .. }, Positions::Rope { tables: theirs, .. }) =
        (&folder.positions, &file.positions)
    else {
        return folder.positions == file.positions;
    };
    let same = |ours: &RopeConfig, theirs: &RopeConfig, context_len: usize| {
        let (ours, theirs) = (ours.frequencies(context_len), theirs.frequencies(context_len));
        ours.frequencies.len() == theirs.frequencies.len()
            && is_close(ours.factor, theirs.factor)
            && ours.frequencies.iter().zip(&theirs.frequencies).all(|(&a, &b)| is_close(a, b))
    };
    // LongRoPE has one set of factors for short contexts and one for long ones.
    let both =
        |ours: &RopeConfig, theirs: &RopeConfig| [1, folder.context_len].into_iter().all(|len| same(ours, theirs, len));
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| both(ours, theirs))
}

/// Returns the first setting that differs: its name, and the two values as words.
fn difference(folder: &DecoderConfig, file: &DecoderConfig) -> (String, String, String) {
    let (ours, theirs) = (settings(folder), settings(file));
    for ((what, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
        if ours != theirs {
            return (what.into(), ours, theirs);
        }
    }
    for (layer, (ours, theirs)) in folder.layers.iter().zip(&file.layers).enumerate() {
        for (what, words) in LAYER_SETTINGS {
            if words(ours) != words(theirs) {
                return (format!("the {what} of layer {layer}"), words(ours), words(theirs));
            }
        }
    }
    // Every field is above; this is for one that is added and forgotten there.
    ("the configuration".into(), format!("{folder:?}"), format!("{file:?}"))
}

/// A name, and the words of a layer's setting.
type LayerSetting = (&'static str, fn(&LayerConfig) -> String);

const LAYER_SETTINGS: [LayerSetting; 6] = [
    ("window", settings::window),
    ("rotation", settings::rope),
    ("kind", |layer| settings::mixer(layer.mixer).into()),
    ("MLP", settings::layer_mlp),
    ("size", settings::key_heads),
    ("source of keys and values", settings::kv_source),
];

/// Returns the names and the words of all settings that layers share. The order is that in which differences are told.
fn settings(config: &DecoderConfig) -> Vec<(&'static str, String)> {
    use settings::{optional, yes_or_no};
    let number = |number: f32| number.to_string();
    let size = |size: usize| size.to_string();
    vec![
        ("the activation", settings::activation(config.activation).into()),
        ("the attention scale", number(config.attention_scale)),
        ("the embedding scale", number(config.embedding_scale)),
        ("the residual scale", number(config.residual_scale)),
        ("the divisor of logits", number(config.logits_divisor)),
        ("the soft cap of attention", optional(config.attention_soft_cap, number)),
        ("the soft cap of logits", optional(config.logits_soft_cap, number)),
        ("the mixture of experts", optional(config.experts, settings::mixture)),
        ("latent attention", optional(config.latent_attention, settings::latent_attention)),
        ("the delta net", optional(config.delta_net, settings::delta_net)),
        ("the Mamba-2 layers", optional(config.mamba2, settings::mamba2)),
        ("the short convolution", optional(config.short_convolution, settings::convolution)),
        ("the way of positions", settings::positions(&config.positions)),
        ("the context length", size(config.context_len)),
        ("the size of the vocabulary", size(config.vocab_size)),
        ("the width", size(config.hidden_size)),
        ("the number of heads", size(config.num_heads)),
        ("the number of key heads", size(config.num_kv_heads)),
        ("the size of a head", size(config.head_size)),
        ("the width of the MLP", size(config.mlp_size)),
        ("the kind of norms", settings::norm(config.norm).into()),
        ("the epsilon of norms", number(config.norm_eps)),
        ("norms of inputs", yes_or_no(config.input_norms)),
        ("norms of outputs", yes_or_no(config.output_norms)),
        ("the norm of queries and keys", optional(config.qk_norm, settings::qk_norm)),
        ("the norm of values", yes_or_no(config.value_norm)),
        ("the MLP", settings::mlp(config.mlp).into()),
        ("a dense MLP beside experts", yes_or_no(config.dense_beside_experts)),
        ("the width of experts' inputs", optional(config.expert_input_size, size)),
        ("the width of layers' own inputs", optional(config.layer_input_size, size)),
        ("scales of layers", yes_or_no(config.layer_scales)),
        ("attention sinks", yes_or_no(config.attention_sinks)),
        ("the gate of attention", yes_or_no(config.attention_gate)),
        ("the number of layers", size(config.layers.len())),
        ("the layer that predicts a further token", yes_or_no(config.predictor.is_some())),
    ]
}
