//! The shapes of published models, with random weights.

use pellucid_tensor::DType;

use super::*;

#[test]
fn models_have_the_published_number_of_parameters() {
    let parameters = |name: &str| -> usize {
        let model = SyntheticModel::named(name).expect("a known model");
        let tensors = model.tensors(QuantScheme::named("bf16").expect("a known scheme"));
        tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    };
    // As stated by the publishers.
    assert_eq!(parameters("SmolLM2-135M"), 134_515_008);
    assert_eq!(parameters("smollm3-3b"), 3_075_098_624);
    assert_eq!(parameters("llama-3.2-1b"), 1_235_814_400);
    assert_eq!(parameters("llama-3.1-8b"), 8_030_261_248);
    assert_eq!(parameters("qwen2.5-0.5b"), 494_032_768);
    assert_eq!(parameters("qwen3-0.6b"), 596_049_920);
    assert_eq!(parameters("mixtral-8x7b"), 46_702_792_704);
    assert_eq!(parameters("qwen3-30b-a3b"), 30_532_122_624);
    assert_eq!(parameters("gpt-oss-20b"), 20_914_757_184);
    assert_eq!(parameters("deepseek-v2-lite"), 15_706_484_224);
}

#[test]
fn a_synthetic_model_opens_like_a_file() {
    let names = ["smollm2-135m", "smollm3-3b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-0.8b"];
    let names = names.into_iter().chain(["deepseek-v2-lite", "granite-4.0-h-1b", "granite-4.0-h-tiny"]);
    let models: Vec<_> = names.map(|name| SyntheticModel::named(name).expect("a known model").miniature()).collect();
    let schemes = || QuantScheme::ALL.into_iter().chain([QuantScheme::MXFP4]);
    for (model, scheme) in models.iter().flat_map(|model| schemes().map(move |scheme| (model, scheme))) {
        let checkpoint = model.checkpoint(scheme, 1, &mut |_, _| ()).expect("a whole model");
        let config = crate::read_config(&checkpoint).expect("a known family");
        assert_eq!((config.vocab_size, config.num_layers()), (512, model.few_layers()));
        assert_eq!(config.has_state(), model.delta_net.is_some() || model.mamba2.is_some());
        assert_eq!(config.experts.is_some(), model.experts.is_some());
        let norm = checkpoint.tensor("output_norm.weight").expect("a norm");
        assert_eq!(norm.info.dtype, DType::F32);
    }
}
