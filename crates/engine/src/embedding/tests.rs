//! The loop with an embedder whose vectors are sums of ids.

use std::sync::mpsc::{Receiver, channel};

use pellucid_model::Pooling;

use super::*;

/// Waits before each batch until `go` gives a word, and fails or panics at certain ids.
struct Sums {
    info: EmbedderInfo,
    go: Option<Receiver<()>>,
}

impl Embedder for Sums {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn embed(&mut self, texts: &[EmbeddingText<'_>], out: &mut Vec<f32>) -> Result<(), pellucid_model::Error> {
        if let Some(go) = &self.go {
            let _ = go.recv();
        }
        for text in texts {
            assert!(!text.ids.contains(&7), "the id that panics");
            if text.ids.contains(&8) {
                return Err(pellucid_model::Error::EmptyText);
            }
            out.extend([text.ids.iter().sum::<u32>() as f32, text.ids.len() as f32]);
        }
        Ok(())
    }
}

fn handle(max_waiting: usize, go: Option<Receiver<()>>) -> EmbeddingHandle {
    let info = EmbedderInfo {
        architecture: "sums".into(),
        num_dimensions: 2,
        scores_pairs: false,
        context_len: 4,
        vocab_size: 10,
        pooling: Pooling::Mean,
    };
    EmbeddingHandle::start(Box::new(Sums { info, go }), max_waiting)
}

fn input(ids: &[u32]) -> EmbeddingInput {
    EmbeddingInput::new(ids.to_vec())
}

const A: TenantId = TenantId(1);

#[test]
fn each_text_gets_its_vector_in_order() {
    let handle = handle(4, None);
    let found = handle.embed(A, vec![input(&[1, 2]), input(&[9]), input(&[3, 3, 3])]).unwrap();
    assert_eq!(found.vectors().collect::<Vec<_>>(), [[3.0, 2.0], [9.0, 1.0], [9.0, 3.0]]);
    assert_eq!(handle.embed(A, Vec::new()).map(|found| found.values), Ok(Vec::new()));
    let EmbeddingStats { num_texts, num_tokens, num_waiting, num_running, .. } = handle.stats();
    assert_eq!((num_texts, num_tokens, num_waiting, num_running), (3, 6, 0, 0));
    assert_ne!(handle.liveness(), Liveness::Stopped);
}

#[test]
fn wrong_texts_are_refused_before_they_wait() {
    let handle = handle(4, None);
    let refused = |ids: &[u32]| handle.embed(A, vec![input(&[1]), input(ids)]).unwrap_err();
    assert_eq!(refused(&[]), Error::EmptyPrompt);
    assert_eq!(refused(&[1; 5]), Error::TextTooLong { text: 5, context: 4 });
    assert_eq!(refused(&[10]), Error::IdOutsideVocabulary { id: 10, vocab_size: 10 });
    assert_eq!(handle.stats().num_texts, 0);
}

#[test]
fn an_error_or_a_panic_ends_only_the_requests_of_its_batch() {
    let handle = handle(4, None);
    assert!(matches!(handle.embed(A, vec![input(&[7])]), Err(Error::Internal(text)) if text.contains("panics")));
    assert!(matches!(handle.embed(A, vec![input(&[8])]), Err(Error::Model(_))));
    assert_eq!(handle.embed(A, vec![input(&[5])]).unwrap().values, [5.0, 1.0]);
}

#[test]
fn a_full_queue_refuses_and_a_dropped_ticket_frees_its_place() {
    let (go, wait) = channel();
    let handle = handle(2, Some(wait));
    let (sender, done) = channel();
    let submit = |id: u32| {
        let sender = sender.clone();
        handle.submit(A, vec![input(&[id])], move |result| _ = sender.send(result.map(|found| found.values)))
    };
    let first = submit(1).unwrap();
    while handle.stats().num_running == 0 {
        std::thread::yield_now();
    }
    let (second, third) = (submit(2).unwrap(), submit(3).unwrap());
    assert_eq!(submit(4).unwrap_err(), Error::QueueFull);
    drop(second);
    go.send(()).unwrap();
    go.send(()).unwrap();
    assert_eq!(done.recv().unwrap(), Ok(vec![1.0, 1.0]));
    assert_eq!(done.recv().unwrap(), Ok(vec![3.0, 1.0]), "the cancelled request is not computed");
    drop((first, third));
    drop(go);
    drop(handle);
    assert!(done.try_recv().is_err());
}
