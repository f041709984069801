//! How many threads the CPU backend gets when nobody says.

use std::collections::BTreeSet;
use std::path::Path;

/// One thread per physical core, and not more than this process may use.
///
/// Matrix products saturate a core with one thread; a second one on the same core only makes every
/// barrier wait longer.
pub(super) fn default_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match physical_cores(Path::new("/sys/devices/system/cpu")) {
        0 => usable,
        n => n.min(usable),
    }
}

/// Distinct sets of sibling threads under a sysfs folder; 0 when it says nothing.
fn physical_cores(folder: &Path) -> usize {
    let cpus = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let siblings = cpus.filter_map(|cpu| {
        std::fs::read_to_string(cpu.path().join("topology/thread_siblings_list")).ok()
    });
    siblings.collect::<BTreeSet<String>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_of_one_core_count_once() {
        let folder = tempfile::tempdir().unwrap();
        for (cpu, siblings) in [("cpu0", "0,2\n"), ("cpu1", "1,3\n"), ("cpu2", "0,2\n")] {
            let topology = folder.path().join(cpu).join("topology");
            std::fs::create_dir_all(&topology).unwrap();
            std::fs::write(topology.join("thread_siblings_list"), siblings).unwrap();
        }
        std::fs::create_dir(folder.path().join("cpufreq")).unwrap();

        assert_eq!(physical_cores(folder.path()), 2);
    }

    #[test]
    fn there_is_at_least_one_thread() {
        assert!(default_threads() >= 1);
        assert_eq!(physical_cores(Path::new("/nowhere")), 0);
    }
}
