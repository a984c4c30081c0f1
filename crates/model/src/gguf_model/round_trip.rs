//! Compares a folder's configuration with the one that a reader of the GGUF file gets, and refuses a difference.

use crate::Error;
use crate::config::{DecoderConfig, Experts, LayerConfig, Positions};
use crate::rope::RopeConfig;

/// Returns an error that names the first setting which a reader of the file would get wrong.
pub(super) fn check(folder: &DecoderConfig, file: &DecoderConfig) -> Result<(), Error> {
    // These may differ: the family can share the GGUF form of another, and RoPE scaling can be written in another way.
    let mut expected = folder.clone();
    expected.architecture.clone_from(&file.architecture);
    expected.leaves_out_images = file.leaves_out_images;
    // Readers of these files look for the norms themselves.
    if folder.architecture == "glm4-moe" {
        expected.qk_norm = file.qk_norm;
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

/// Whether both rotate the same pairs by the same angles. Divisors of frequencies are rounded once more in the file.
fn same_positions(folder: &DecoderConfig, file: &DecoderConfig) -> bool {
    let (Positions::Rope { tables: ours, .. }, Positions::Rope { tables: theirs, .. }) =
        (&folder.positions, &file.positions)
    else {
        return folder.positions == file.positions;
    };
    let close = |a: f32, b: f32| (a - b).abs() <= 1e-6 * a.abs();
    let same = |ours: &RopeConfig, theirs: &RopeConfig, context_len: usize| {
        let (ours, theirs) = (ours.frequencies(context_len), theirs.frequencies(context_len));
        ours.frequencies.len() == theirs.frequencies.len()
            && close(ours.factor, theirs.factor)
            && ours.frequencies.iter().zip(&theirs.frequencies).all(|(&a, &b)| close(a, b))
    };
    // LongRoPE has one set of factors for short contexts and one for long ones.
    let both =
        |ours: &RopeConfig, theirs: &RopeConfig| [1, folder.context_len].into_iter().all(|len| same(ours, theirs, len));
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| both(ours, theirs))
}

/// Returns the first setting that differs: its name, and the two values as text.
fn difference(folder: &DecoderConfig, file: &DecoderConfig) -> (String, String, String) {
    let caps = |cap: Option<f32>| cap.map_or("none".into(), |cap| cap.to_string());
    let settings = [
        ("the activation", format!("{:?}", folder.activation), format!("{:?}", file.activation)),
        ("the attention scale", folder.attention_scale.to_string(), file.attention_scale.to_string()),
        ("the embedding scale", folder.embedding_scale.to_string(), file.embedding_scale.to_string()),
        ("the residual scale", folder.residual_scale.to_string(), file.residual_scale.to_string()),
        ("the divisor of logits", folder.logits_divisor.to_string(), file.logits_divisor.to_string()),
        ("the soft cap of attention", caps(folder.attention_soft_cap), caps(file.attention_soft_cap)),
        ("the soft cap of logits", caps(folder.logits_soft_cap), caps(file.logits_soft_cap)),
        ("the mixture of experts", mixture(folder.experts), mixture(file.experts)),
        ("positions", format!("{:?}", folder.positions), format!("{:?}", file.positions)),
    ];
    if let Some((what, ours, theirs)) = settings.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        return (what.into(), ours, theirs);
    }
    let layers = folder.layers.iter().zip(&file.layers).enumerate();
    for (layer, (ours, theirs)) in layers.filter(|(_, (ours, theirs))| ours != theirs) {
        if ours.window != theirs.window {
            return (format!("the window of layer {layer}"), window(*ours), window(*theirs));
        }
        if ours.rope != theirs.rope {
            let kind = |layer: &LayerConfig| layer.rope.map_or("none".into(), |table| format!("rotary table {table}"));
            return (format!("the rotation of layer {layer}"), kind(ours), kind(theirs));
        }
        if ours.experts != theirs.experts {
            let kind = |layer: &LayerConfig| if layer.experts { "experts" } else { "one dense MLP" };
            return (format!("the MLP of layer {layer}"), kind(ours).into(), kind(theirs).into());
        }
    }
    ("the configuration".into(), format!("{folder:?}"), format!("{file:?}"))
}

fn mixture(experts: Option<Experts>) -> String {
    let Some(Experts { num_experts, mlp_size, shared_mlp_size, routing, .. }) = experts else { return "none".into() };
    let weights = if routing.normalize { "normalised weights" } else { "unnormalised weights" };
    let groups = routing.groups.map_or(String::new(), |(all, used)| format!(" from {used} of {all} groups"));
    let shared = shared_mlp_size.map_or(String::new(), |size| format!(", and one of {size} for every token"));
    format!("{num_experts} experts of {mlp_size}, {} per token{groups} with {weights}{shared}", routing.num_selected)
}

fn window(layer: LayerConfig) -> String {
    layer.window.map_or("none".into(), |window| format!("{window} positions"))
}
