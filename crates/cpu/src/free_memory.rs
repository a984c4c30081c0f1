//! Free memory of the system and within the control groups (cgroups) that limit this process.

#[cfg(target_os = "linux")]
use std::path::{Path, PathBuf};

/// Returns the bytes that can still be allocated without swapping and without exceeding a limit of a cgroup.
#[cfg(target_os = "linux")]
pub fn free_memory() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let available = available_in(&read(Path::new("/proc/meminfo"))?)?;
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let left = cgroups_of(&groups).iter().filter_map(|group| group.left(&read)).min();
    Some(left.map_or(available, |left| left.min(available)))
}

#[cfg(not(target_os = "linux"))]
pub fn free_memory() -> Option<u64> {
    None
}

/// The value of the line `MemAvailable:   12345 kB`, in bytes.
#[cfg(target_os = "linux")]
fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The files of a cgroup that hold its limit and its usage. The two versions of cgroups differ only in their names.
#[cfg(target_os = "linux")]
#[derive(Debug, PartialEq)]
struct Cgroup {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// Names in `memory.stat` of cached file pages, which count as usage but can be dropped: above all the model file.
    files: [&'static str; 2],
}

#[cfg(target_os = "linux")]
impl Cgroup {
    /// Returns the bytes that are left within the limit; `None` if the group does not exist or has no limit. Version 1
    /// states a limit beyond all memory instead of none.
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

/// Returns the cgroups that limit a process: those in the lines `number:controllers:/path` of its `/proc/self/cgroup`,
/// and all above them.
///
/// In a container the path may be that of the host and not be visible; the container's own group is then the visible
/// root.
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
    fn free_memory_is_read_from_the_system() {
        assert_eq!(available_in("MemTotal: 9 kB\nMemAvailable:    1234 kB\n"), Some(1234 * 1024));
        assert_eq!(available_in("MemTotal: 9 kB\n"), None);
        assert!(free_memory().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn every_cgroup_above_a_process_limits_it_and_cached_files_do_not_count() {
        let groups = "5:cpu,cpuacct:/a\n4:memory:/box\n0::/user.slice/one.service\nnonsense\n";
        let folders: Vec<PathBuf> = cgroups_of(groups).into_iter().map(|group| group.folder).collect();
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
        let left: Vec<Option<u64>> = cgroups_of(groups).iter().map(|group| group.left(&read)).collect();
        assert_eq!(left, [Some(9_223_372_036_854_767_616), None, None, Some(700), None]);
    }
}
