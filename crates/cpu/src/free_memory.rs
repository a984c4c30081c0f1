//! How much memory is left, for the system and for the groups of processes that this one is confined to.

#[cfg(target_os = "linux")]
use std::path::{Path, PathBuf};

/// Memory that can still be taken without swapping and without being killed for it.
#[cfg(target_os = "linux")]
pub(crate) fn free_memory() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let available = available_in(&read(Path::new("/proc/meminfo"))?)?;
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let left = cgroups_of(&groups).iter().filter_map(|place| place.left(&read)).min();
    Some(left.map_or(available, |left| left.min(available)))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn free_memory() -> Option<u64> {
    None
}

/// The line `MemAvailable:   12345 kB`, in bytes.
#[cfg(target_os = "linux")]
fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Where a group says what it may take and what it has taken. The two versions of these groups differ in names alone.
#[cfg(target_os = "linux")]
#[derive(Debug, PartialEq)]
struct Cgroup {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// What it has taken of files that can be read again, by the names in `memory.stat`: the model that was just loaded, above all.
    files: [&'static str; 2],
}

#[cfg(target_os = "linux")]
impl Cgroup {
    /// `None` where there is no such group, or no limit. Version 1 has a limit beyond all memory instead.
    fn left(&self, read: &impl Fn(&Path) -> Option<String>) -> Option<u64> {
        let number = |name: &str| read(&self.folder.join(name))?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = read(&self.folder.join("memory.stat")).unwrap_or_default();
        let of_files = |name: &str| {
            let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
            fields
                .find(|(field, _)| *field == name)
                .and_then(|(_, bytes)| bytes.trim().parse::<u64>().ok())
                .unwrap_or(0)
        };
        let files = self.files.into_iter().fold(0, |all, name| of_files(name).saturating_add(all));
        Some(limit.saturating_sub(used.saturating_sub(files)))
    }
}

/// The groups that confine a process, by the lines `number:controllers:/path` of its `/proc/self/cgroup`: each of its own and all above.
///
/// In a container the path may be that of the host, of which nothing is to be seen; its own group is then the root of what is.
#[cfg(target_os = "linux")]
fn cgroups_of(groups: &str) -> Vec<Cgroup> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit, used, files) = if controllers.is_empty() {
            ("/sys/fs/cgroup", "memory.max", "memory.current", ["active_file", "inactive_file"])
        } else if controllers.split(',').any(|controller| controller == "memory") {
            let files = ["total_active_file", "total_inactive_file"];
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", files)
        } else {
            continue;
        };
        for above in Path::new(path.trim_start_matches('/')).ancestors() {
            found.push(Cgroup { folder: Path::new(root).join(above), limit, used, files });
        }
    }
    found
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn the_system_says_what_is_free() {
        assert_eq!(available_in("MemTotal: 9 kB\nMemAvailable:    1234 kB\n"), Some(1234 * 1024));
        assert_eq!(available_in("MemTotal: 9 kB\n"), None);
        assert!(free_memory().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn every_group_above_a_process_may_confine_it_and_files_do_not_count() {
        let groups = "5:cpu,cpuacct:/a\n4:memory:/box\n0::/user.slice/one.service\nnonsense\n";
        let folders: Vec<PathBuf> = cgroups_of(groups).into_iter().map(|place| place.folder).collect();
        let expected = [
            "/sys/fs/cgroup/memory/box",
            "/sys/fs/cgroup/memory/",
            "/sys/fs/cgroup/user.slice/one.service",
            "/sys/fs/cgroup/user.slice",
            "/sys/fs/cgroup/",
        ];
        assert_eq!(folders, expected.map(PathBuf::from));
        let files = [
            ("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "4096\n"),
            ("/sys/fs/cgroup/user.slice/one.service/memory.max", "max\n"),
            ("/sys/fs/cgroup/user.slice/one.service/memory.current", "700\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "1000\n"),
            ("/sys/fs/cgroup/user.slice/memory.current", "900\n"),
            ("/sys/fs/cgroup/user.slice/memory.stat", "anon 300\nactive_file 200\ninactive_file 400\nfile 700\n"),
        ];
        let read = |path: &Path| {
            files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, content)| (*content).to_string())
        };
        let left: Vec<Option<u64>> = cgroups_of(groups).iter().map(|place| place.left(&read)).collect();
        assert_eq!(left, [Some(9_223_372_036_854_767_616), None, None, Some(700), None]);
    }
}
