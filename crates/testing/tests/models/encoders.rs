//! Encoders against the reference implementation's rows, from both file formats, on every instruction set; and the bits
//! of a vector, which depend on its text alone.

use std::path::{Path, PathBuf};

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_model::{
    Decoder, DecoderEmbedder, Embedder, EmbeddingText, Encoder, Error, LoadOptions, Pooling, is_encoder,
};
use pellucid_selftest::goldens;
use pellucid_tensor::DType;
use pellucid_testing::{cpu, exact_isa};

/// Maximum difference of a value. The reference differs from its own f64 result by up to 8e-6 on these models, and ours
/// sums in another order. The smallest mistake that was tried on purpose, GELU's tanh form, changes a value by 7e-4.
const TOLERANCE: f32 = 5e-5;

struct GoldenEncoder {
    folder: PathBuf,
    texts: Vec<Vec<u32>>,
    second_at: Vec<usize>,
    /// `[tokens][hidden]` of each text.
    rows: Vec<Vec<f32>>,
}

fn golden_encoders() -> Vec<GoldenEncoder> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/encoders");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders.into_iter().map(read_golden).collect()
}

fn read_golden(folder: PathBuf) -> GoldenEncoder {
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let texts: Vec<Vec<u32>> = serde_json::from_value(golden["texts"].clone()).unwrap();
    let bytes = std::fs::read(folder.join("rows.bin")).unwrap();
    let values: Vec<f32> = bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect();
    let hidden = values.len() / texts.iter().map(Vec::len).sum::<usize>();
    let mut start = 0;
    let rows = texts.iter().map(|text| {
        let end = start + text.len() * hidden;
        let rows = values[start..end].to_vec();
        start = end;
        rows
    });
    let rows = rows.collect();
    GoldenEncoder { folder, second_at: serde_json::from_value(golden["second_at"].clone()).unwrap(), texts, rows }
}

impl GoldenEncoder {
    fn files(&self) -> [PathBuf; 2] {
        [self.folder.clone(), self.folder.join("model.gguf")]
    }

    fn inputs(&self) -> Vec<EmbeddingText<'_>> {
        let pairs = self.texts.iter().zip(&self.second_at);
        pairs.map(|(ids, &second_at)| EmbeddingText { ids, second_at }).collect()
    }
}

fn load(file: &Path, isa: Isa, num_threads: usize, pooling: Pooling) -> Option<Encoder> {
    let backend = cpu(isa, num_threads)?;
    let checkpoint = Checkpoint::open(file).unwrap();
    assert!(is_encoder(&checkpoint).unwrap());
    Some(Encoder::load(&checkpoint, backend, Some(pooling), LoadOptions::default(), &mut |_, _| {}).unwrap())
}

fn vectors(encoder: &mut dyn Embedder, texts: &[EmbeddingText<'_>]) -> Vec<f32> {
    let mut out = Vec::new();
    encoder.embed(texts, &mut out).unwrap();
    out
}

fn pooled(pooling: Pooling, rows: &[f32], len: usize) -> Vec<f32> {
    let num_rows = rows.len() / len;
    match pooling {
        Pooling::Cls => rows[..len].to_vec(),
        Pooling::Last => rows[rows.len() - len..].to_vec(),
        Pooling::Mean => (0..len)
            .map(|col| rows.iter().skip(col).step_by(len).map(|value| f64::from(*value)).sum::<f64>() / num_rows as f64)
            .map(|mean| mean as f32)
            .collect(),
    }
}

#[test]
fn vectors_equal_those_of_the_reference() {
    let mut compared = 0;
    for golden in golden_encoders() {
        for file in golden.files() {
            for isa in Isa::ALL {
                for pooling in Pooling::ALL {
                    let Some(mut encoder) = load(&file, isa, 2, pooling) else { continue };
                    let found = vectors(&mut encoder, &golden.inputs());
                    let len = encoder.info().num_dimensions;
                    assert_eq!(found.len(), golden.texts.len() * len);
                    for (index, (found, rows)) in found.chunks_exact(len).zip(&golden.rows).enumerate() {
                        let expected = pooled(pooling, rows, len);
                        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        assert!(worst <= TOLERANCE, "{} text {index}, {pooling}, {isa}: {worst}", file.display());
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared >= 2 * 3 * 4 * 4, "only {compared} vectors were compared");
}

/// The bits of a vector are the same alone and in a batch, at any place of it, and with any number of threads.
#[test]
fn a_vector_depends_on_its_text_alone() {
    for golden in golden_encoders() {
        for isa in Isa::ALL {
            let Some(mut encoder) = load(&golden.folder, isa, 1, Pooling::Mean) else { continue };
            let texts = golden.inputs();
            let alone: Vec<Vec<f32>> = texts.iter().map(|text| vectors(&mut encoder, &[*text])).collect();
            // Many copies: the texts cross the edges of batches at different places.
            let order: Vec<usize> = (0..40).map(|i| (i * 7 + i / 5) % texts.len()).collect();
            let many: Vec<EmbeddingText<'_>> = order.iter().map(|&index| texts[index]).collect();
            for num_threads in [1, 2, 3] {
                let Some(mut encoder) = load(&golden.folder, isa, num_threads, Pooling::Mean) else { continue };
                let found = vectors(&mut encoder, &many);
                let len = encoder.info().num_dimensions;
                for (found, &index) in found.chunks_exact(len).zip(&order) {
                    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(found), bits(&alone[index]), "{isa}, {num_threads} threads, text {index}");
                }
            }
        }
    }
}

#[test]
fn texts_that_the_model_cannot_encode_are_refused_by_name() {
    // The first golden states its pooling.
    let golden = golden_encoders().remove(1);
    let mut encoder = load(&golden.folder, Isa::Scalar, 1, Pooling::Mean).unwrap();
    let mut error = |ids: &[u32]| encoder.embed(&[EmbeddingText::new(ids)], &mut Vec::new()).unwrap_err().to_string();
    assert!(error(&[]).contains("without tokens"));
    assert!(error(&[1, 96]).contains("token id 96 in row 1 is outside the vocabulary of 96"));
    assert!(error(&[1; 129]).contains("outside the context of 128 tokens"));
    let checkpoint = Checkpoint::open(&golden.folder).unwrap();
    let backend = cpu(Isa::Scalar, 1).unwrap();
    let load = |options| Encoder::load(&checkpoint, backend.clone(), None, options, &mut |_, _| {});
    assert!(matches!(load(LoadOptions::default()), Err(Error::NoPooling)));
    let error = load(LoadOptions { context_len: Some(500), ..LoadOptions::default() }).unwrap_err().to_string();
    assert!(error.contains("500 tokens was requested"), "{error}");
}

fn load_pooled(folder: &Path, num_threads: usize, pooling: Pooling) -> DecoderEmbedder {
    let backend = cpu(exact_isa(), num_threads).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let decoder = Decoder::load(&checkpoint, backend, LoadOptions::default(), &mut |_, _| {}).unwrap();
    DecoderEmbedder::new(decoder, pooling, DType::F32).unwrap()
}

/// Decoders whose rows are pooled: the vectors are the reference's, and depend on their text alone.
#[test]
fn vectors_of_decoders_are_pooled_from_their_rows() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/pooled_decoders");
    let mut compared = 0;
    for golden in goldens() {
        let Ok(bytes) = std::fs::read(folder.join(format!("{}.bin", golden.name))) else { continue };
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect();
        let len = values.len() / golden.prompts.iter().map(Vec::len).sum::<usize>();
        for pooling in Pooling::ALL {
            let texts: Vec<EmbeddingText<'_>> = golden.prompts.iter().map(|ids| EmbeddingText::new(ids)).collect();
            let mut embedder = load_pooled(&golden.folder, 2, pooling);
            let found = vectors(&mut embedder, &texts);
            let mut start = 0;
            for (found, text) in found.chunks_exact(len).zip(&texts) {
                let rows = &values[start..start + text.ids.len() * len];
                start += rows.len();
                let expected = pooled(pooling, rows, len);
                let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst <= TOLERANCE, "{} {pooling}: {worst}", golden.name);
                compared += 1;
            }
            let mut alone = load_pooled(&golden.folder, 1, pooling);
            let alone: Vec<f32> = texts.iter().rev().flat_map(|text| vectors(&mut alone, &[*text])).collect();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let reversed: Vec<f32> = found.chunks_exact(len).rev().flatten().copied().collect();
            assert_eq!(bits(&alone), bits(&reversed), "{} {pooling}", golden.name);
        }
    }
    assert_eq!(compared, 2 * 3 * 3);
}

/// Cross-encoders give the reference's probabilities to pairs of texts.
#[test]
fn scores_of_cross_encoders_equal_those_of_the_reference() {
    for name in ["bert", "modern-bert"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/rerankers").join(name);
        let golden: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
        let texts: Vec<Vec<u32>> = serde_json::from_value(golden["texts"].clone()).unwrap();
        let second_at: Vec<usize> = serde_json::from_value(golden["second_at"].clone()).unwrap();
        let expected: Vec<f32> = serde_json::from_value(golden["scores"].clone()).unwrap();
        let inputs: Vec<EmbeddingText<'_>> =
            texts.iter().zip(&second_at).map(|(ids, &second_at)| EmbeddingText { ids, second_at }).collect();
        for isa in Isa::ALL {
            let Some(mut encoder) = load(&folder, isa, 2, Pooling::Last) else { continue };
            assert!(encoder.info().scores_pairs);
            let found = vectors(&mut encoder, &inputs);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-5, "{name} on {isa}: {found} is not {expected}");
            }
            let alone: Vec<f32> = inputs.iter().flat_map(|text| vectors(&mut encoder, &[*text])).collect();
            assert_eq!(alone, found);
        }
    }
}
