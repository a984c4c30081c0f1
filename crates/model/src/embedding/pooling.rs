//! Pooling: the rows of a text become one vector.

use std::fmt;

/// How the rows of a text become its vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The mean of all rows.
    Mean,
    /// The first row, that of the classification token.
    Cls,
    /// The last row, usually that of an end token.
    Last,
}

impl Pooling {
    pub const ALL: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }

    pub fn named(name: &str) -> Option<Pooling> {
        Pooling::ALL.into_iter().find(|pooling| pooling.name() == name)
    }

    /// Appends the vector of a text with these rows of `len` values. Sums run in the order of the rows, in f64, so that
    /// their rounding does not depend on the length of the text.
    pub(crate) fn apply(self, rows: &[f32], len: usize, out: &mut Vec<f32>) {
        match self {
            Pooling::Cls => out.extend_from_slice(&rows[..len]),
            Pooling::Last => out.extend_from_slice(&rows[rows.len() - len..]),
            Pooling::Mean => {
                let mut sums = vec![0.0f64; len];
                for row in rows.chunks_exact(len) {
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                }
                let num_rows = (rows.len() / len) as f64;
                out.extend(sums.iter().map(|sum| (sum / num_rows) as f32));
            }
        }
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_one_vector() {
        let rows = [1.0, 2.0, 3.0, 4.0, 8.0, 0.0];
        let pooled = |pooling: Pooling| {
            let mut out = Vec::new();
            pooling.apply(&rows, 2, &mut out);
            out
        };
        assert_eq!(pooled(Pooling::Mean), [4.0, 2.0]);
        assert_eq!(pooled(Pooling::Cls), [1.0, 2.0]);
        assert_eq!(pooled(Pooling::Last), [8.0, 0.0]);
        assert!(Pooling::ALL.into_iter().all(|pooling| Pooling::named(pooling.name()) == Some(pooling)));
    }
}
