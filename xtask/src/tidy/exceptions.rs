//! Findings that are accepted, with reasons: `xtask/exceptions.toml`.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use toml::{Table, Value};

use super::Finding;

/// The path of the file, for findings about the exceptions themselves.
const FILE: &str = "xtask/exceptions.toml";

/// An accepted breach of a rule.
#[derive(Debug, Clone)]
struct Exception {
    rule: String,
    /// A file or folder, or the name of a package for the rules on packages.
    path: String,
}

/// The content of `xtask/exceptions.toml`.
#[derive(Debug, Default)]
pub(super) struct Exceptions {
    accepted: Vec<Exception>,
    /// Licences that a dependency may have.
    pub(super) licences: BTreeSet<String>,
}

impl Exceptions {
    /// Reads `[[exception]]` tables with `rule`, `path` and `reason`, and the list `licences`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let table: Table = text.parse().with_context(|| format!("{FILE} is no TOML"))?;
        let mut exceptions = Self::default();
        for entry in table.get("exception").and_then(Value::as_array).into_iter().flatten() {
            let field = |name: &str| {
                let value = entry.get(name).and_then(Value::as_str);
                value.map(str::to_owned).with_context(|| format!("{FILE}: an exception lacks `{name}`: {entry:?}"))
            };
            let (rule, path, reason) = (field("rule")?, field("path")?, field("reason")?);
            if reason.split_whitespace().count() < 4 {
                bail!("{FILE}: the reason for {rule} of {path} must be a sentence, found {reason:?}");
            }
            exceptions.accepted.push(Exception { rule, path });
        }
        let licences = table.get("licences").and_then(Value::as_array).into_iter().flatten();
        exceptions.licences = licences.filter_map(Value::as_str).map(str::to_owned).collect();
        Ok(exceptions)
    }

    /// Drops the accepted findings. An exception that no finding needs becomes a finding, so that the list only
    /// shrinks.
    pub(super) fn apply(&self, findings: Vec<Finding>) -> Vec<Finding> {
        let mut used = vec![false; self.accepted.len()];
        let mut left = Vec::new();
        for finding in findings {
            match self.accepted.iter().position(|exception| exception.covers(&finding)) {
                Some(index) => used[index] = true,
                None => left.push(finding),
            }
        }
        for (exception, _) in self.accepted.iter().zip(used).filter(|(_, used)| !used) {
            let message =
                format!("{} no longer needs its exception from {}: remove it", exception.path, exception.rule);
            left.push(Finding::new("exceptions", FILE, 0, message));
        }
        left
    }
}

impl Exception {
    /// A path that ends in a slash covers everything below it.
    fn covers(&self, finding: &Finding) -> bool {
        let below = self.path.ends_with('/') && finding.path.starts_with(&self.path);
        self.rule == finding.rule && (below || self.path == finding.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "[[exception]]\nrule = \"file-size\"\npath = \"a.rs\"\nreason = \"one table, read as a whole\"\n";

    #[test]
    fn an_accepted_finding_is_dropped_and_another_stays() {
        let exceptions = Exceptions::parse(ONE).expect("valid");
        let accepted = Finding::new("file-size", "a.rs", 0, "");
        let other = Finding::new("file-size", "b.rs", 0, "");
        assert_eq!(exceptions.apply(vec![accepted, other.clone()]), [other]);
    }

    #[test]
    fn an_exception_without_a_finding_is_reported() {
        let left = Exceptions::parse(ONE).expect("valid").apply(Vec::new());
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].rule, "exceptions");
    }

    #[test]
    fn an_exception_without_a_reason_is_refused() {
        let text = ONE.replace("one table, read as a whole", "big");
        assert!(Exceptions::parse(&text).is_err());
        assert!(Exceptions::parse("[[exception]]\nrule = \"file-size\"\npath = \"a.rs\"\n").is_err());
    }
}
